"""Formats of stored keys and values: the model's own dtype, one byte a number, or a product of thin factors.

Keys have a few channels much larger than the others, the same ones for every token, so each channel of each head gets
a scale. Values have no such channels, so each token of each head gets one (Liu et al., KIVI, arXiv 2402.02750, section
3). Keys are stored unrotated, where their channels vary least. Low rank is for differences between caches: a
context changes a chunk's keys and values along a few directions only (Kamera, arXiv 2606.23581). Whole caches are not
like that, and no store writes one that way by itself.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

RANKS = {f"rank{rank}": rank for rank in (4, 8, 16, 32, 64)}
"""Formats with so many directions a layer, for keys and for values."""


def effective_rank(kv_dtype: str, tokens: int, channels: int) -> int:
    """Return a format's rank for a matrix of so many tokens and channels (of all heads together)."""
    return min(RANKS[kv_dtype], tokens, channels)


def factorize(tokens: Tensor, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """Return the best approximation of a matrix by a product of its format's rank (Eckart and Young, 1936).

    Args:
        tokens: `[n, H, D]`, any float dtype.
        kv_dtype: one of `RANKS`.

    Returns:
        `[n, m]` and `[m, H, D]` in the dtype of `tokens`; the directions of one of them are orthonormal.
    """
    n, heads, channels = tokens.shape
    wide = tokens.reshape(n, heads * channels).to(torch.float64)
    m = effective_rank(kv_dtype, n, heads * channels)
    # Eigenvectors of the smaller Gram matrix are singular vectors, at a fraction of the cost of a whole SVD.
    if n <= heads * channels:
        left = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -m:]
        right = left.T @ wide
    else:
        right = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -m:].T
        left = wide @ right.T
    return left.to(tokens.dtype).contiguous(), right.reshape(m, heads, channels).to(tokens.dtype).contiguous()


def multiply_factors(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `factorize` up to what the rank cuts off.

    Args:
        left: `[r, m]`, rows of the first factor.
        right: `[m, H, D]`.
        dtype: of the result.

    Returns:
        `[r, H, D]`.
    """
    flat = left.to(torch.float32) @ right.to(torch.float32).flatten(1)
    return flat.reshape(len(left), *right.shape[1:]).to(dtype)


LOSSLESS = "model"
"""The model's dtype, unchanged."""

LARGEST_INT8 = 127.0

STORE_FORMATS = (LOSSLESS, "int8")
"""Formats a store can be told to write."""

FORMATS = (*STORE_FORMATS, *RANKS)
"""Formats an entry can have."""


def check_kv_dtype(kv_dtype: str) -> None:
    """Raise `ValueError` unless this is a format that a store can be told to write."""
    if kv_dtype not in STORE_FORMATS:
        raise ValueError(f"there is no kv_dtype {kv_dtype!r}; there are {', '.join(STORE_FORMATS)}")


def check_rank(rank: int) -> str:
    """Return the format with a rank; raises `ValueError` if there is none."""
    if f"rank{rank}" not in RANKS:
        raise ValueError(f"there is no format of rank {rank}; there are {', '.join(map(str, RANKS.values()))}")
    return f"rank{rank}"


def side_block(kv_dtype: str) -> Literal["scale", "basis"] | None:
    """Return the kind of block that a format stores beside each block of keys or values, or None."""
    if kv_dtype == LOSSLESS:
        return None
    return "basis" if kv_dtype in RANKS else "scale"


def quantize(tokens: Tensor, *, over: int) -> tuple[Tensor, Tensor]:
    """Write numbers as int8, with shared scales.

    Args:
        tokens: `[n, H, D]`, any float dtype.
        over: dimension whose numbers share a scale: 0 for one scale a channel, 2 for one a token.

    Returns:
        `[n, H, D]` int8, and float32 scales `[1, H, D]` or `[n, H, 1]`.
    """
    wide = tokens.to(torch.float32)
    least = torch.finfo(torch.float32).tiny * LARGEST_INT8
    scale = wide.abs().amax(over, keepdim=True).clamp_min(least) / LARGEST_INT8
    quantized = (wide / scale).round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)
    return quantized.contiguous(), scale.contiguous()


def dequantize(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `quantize` up to rounding."""
    return (quantized.to(torch.float32) * scale).to(dtype)
