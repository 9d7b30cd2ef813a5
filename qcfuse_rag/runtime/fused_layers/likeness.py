"""Whether two ways of computing come to the same, as far as random numbers tell."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error of each row: one way is rounded once, the other several times."""

LOG = logging.getLogger(__name__)


def same(own: Callable[..., Any], other: Callable[..., Any], *given: Tensor) -> bool:
    """Return whether both make the same of what is given; what one of them cannot do is not the same."""
    try:
        pairs = list(zip(_listed(own(*given)), _listed(other(*given)), strict=True))
    except Exception as error:  # of whatever code a model has
        LOG.info("%s cannot be compared: %s: %s", type(own).__name__, type(error).__name__, error)
        return False
    return all(one.shape == two.shape and one.dtype == two.dtype and _near(two, one) for one, two in pairs)


def _near(found: Tensor, expected: Tensor) -> bool:
    """Compare row by row, but for rows that are beyond what the dtype can hold."""
    off, size = (one.float().norm(dim=-1) for one in (found - expected, expected))
    held = size.isfinite()
    return bool(held.any()) and bool((off[held] <= TOLERANCE.get(expected.dtype, 0.0) * size[held]).all())


def _listed(found: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)
