"""Limits of the kernels: devices, dtypes, sizes and the error they are allowed."""

from __future__ import annotations

import torch
from torch import Tensor

SWITCH = "QCFUSE_KERNELS"
"""Environment variable; `0` switches the kernels off, so that torch computes everything."""

OLDEST = (8, 0)
"""Oldest compute capability that is supported: Ampere, the first with bfloat16."""

TOLERANCE = 1e-2

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

MAX_DIM = 256

FP8_SINCE = (8, 9)
"""First compute capability for which Triton converts fp8: Ada and Hopper."""


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the relative error of a result in the Frobenius norm; NaN passes no comparison."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())
