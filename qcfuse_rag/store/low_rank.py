"""Store a matrix as a product of two thin factors: for differences between caches, which are nearly of low rank.

A context changes a chunk's keys and values along a few directions only (Kamera, arXiv 2606.23581). Whole caches are not
like that: they are written this way only on request, see `store.chunk.to_format`.
"""

from __future__ import annotations

import torch
from torch import Tensor

RANKS = {f"rank{rank}": rank for rank in (4, 8, 16, 32, 64)}
"""Formats with so many directions a layer, for keys and for values."""


def effective_rank(numbers: str, tokens: int, channels: int) -> int:
    """Return a format's rank for a matrix of so many tokens and channels (of all heads together)."""
    return min(RANKS[numbers], tokens, channels)


def factorize(tokens: Tensor, numbers: str) -> tuple[Tensor, Tensor]:
    """Return the best approximation of a matrix by a product of its format's rank (Eckart and Young, 1936).

    Args:
        tokens: `[n, H, D]`, any float dtype.
        numbers: one of `RANKS`.

    Returns:
        `[n, m]` and `[m, H, D]` in the dtype of `tokens`; the directions of one of them are orthonormal.
    """
    n, heads, channels = tokens.shape
    wide = tokens.reshape(n, heads * channels).to(torch.float64)
    m = effective_rank(numbers, n, heads * channels)
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
