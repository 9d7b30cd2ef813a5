"""Compare the results of two functions on random numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative error of a row: one function rounds once, the other several times."""

LOG = logging.getLogger(__name__)


def agree(own: Callable[..., Any], other: Callable[..., Any], *given: Tensor) -> bool:
    """Return whether both functions return the same for the same arguments; False if one of them raises."""
    try:
        pairs = list(zip(_listed(own(*given)), _listed(other(*given)), strict=True))
    except Exception as error:  # a model's code may raise anything
        LOG.info("%s cannot be compared: %s: %s", type(own).__name__, type(error).__name__, error)
        return False
    return all(
        found.shape == expected.shape and found.dtype == expected.dtype and _near(found, expected)
        for expected, found in pairs
    )


def _near(found: Tensor, expected: Tensor) -> bool:
    """Compare row by row; rows with values beyond the dtype's range do not count."""
    error, size = ((found - expected).float().norm(dim=-1), expected.float().norm(dim=-1))
    finite = size.isfinite()
    return bool(finite.any()) and bool((error[finite] <= TOLERANCE.get(expected.dtype, 0.0) * size[finite]).all())


def _listed(found: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)
