"""What kernels can run: devices, dtypes, sizes and the error they are allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass

SWITCH = "QCFUSE_KERNELS"
"""Environment variable; `0` has everything computed by torch."""

OLDEST = (8, 0)
"""Compute capability: Ampere, the first with bfloat16."""

TOLERANCE = 1e-2

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

MAX_DIM = 256

FP8_SINCE = (8, 9)
"""Compute capability from which Triton converts fp8: Ada and Hopper."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return how far a result is from what it should be, as a share of that; NaN passes no comparison."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
