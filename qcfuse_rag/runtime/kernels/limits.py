"""The error that kernels are allowed."""

from __future__ import annotations

from torch import Tensor

TOLERANCE = 1e-2


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the relative error of a result in the Frobenius norm; NaN passes no comparison."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())
