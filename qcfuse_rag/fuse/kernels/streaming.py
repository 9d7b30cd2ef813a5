"""What kernels that attend have in common: a streaming softmax over keys, in parts that are put together afterwards.

Streaming softmax is Dao et al., FlashAttention-2 (arXiv 2307.08691); keys in parts are flash decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.fuse.kernels.launch import block_dim, keys_at_once

LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1)
"""Position of what is no row: sees no key."""
KEYS_PER_SPLIT = 256
"""Fewer are not worth a program of their own."""


@triton.jit
def scores_of(query, key, seen, scaling, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Return scores in powers of two, minus infinity where a row does not see a key."""
    score = tl.dot(query, key, input_precision=PRECISION) * scaling
    if CAPPED:
        score = (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0)) * softcap  # tanh
    return tl.where(seen, score * LOG2_E, float("-inf"))


@triton.jit
def stream_keys(
    query,
    k,
    v,
    sinks,
    position,
    real,
    k_token,
    v_token,
    scaling,
    softcap,
    window,
    leads,
    start,
    n_keys,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with a block of rows to keys `start ... start + n_keys` of one head, as far as any row sees them.

    `k` and `v` point to that head's first token, `sinks` to each row's own, which count where `leads`. Returns
    unnormalised sums of values, the sums of weights, and the largest scores that both are relative to.
    """
    stop = tl.minimum(start + n_keys, tl.max(position, 0) + 1)
    begin_at = start
    if WINDOWED:
        first = tl.min(tl.where(real, position, 2147483647), 0) - window + 1
        begin_at = tl.maximum(start, (tl.maximum(first, 0) // BLOCK_KEYS) * BLOCK_KEYS)
    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    if SINKS:  # a logit of the softmax that has no value: it counts once, in the first part
        sink = tl.load(sinks, mask=real, other=0.0).to(tl.float32) * LOG2_E
        largest = tl.where(leads, sink, largest)
        total = tl.where(leads, 1.0, total)
    result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    for begin in range(begin_at, stop, BLOCK_KEYS):
        token = begin + tl.arange(0, BLOCK_KEYS)
        there = token < stop
        key = tl.load(
            k + token[None, :].to(tl.int64) * k_token + dim[:, None],
            mask=there[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        seen = there[None, :] & (token[None, :] <= position[:, None])
        if WINDOWED:
            seen &= position[:, None] - token[None, :] < window
        score = scores_of(query, key, seen, scaling, softcap, CAPPED, PRECISION)
        new = tl.maximum(largest, tl.max(score, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
        weight = tl.exp2(score - safe[:, None])
        fade = tl.exp2(largest - safe)
        value = tl.load(
            v + token[:, None].to(tl.int64) * v_token + value_dim[None, :],
            mask=there[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        result = result * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        total = total * fade + tl.sum(weight, 1)
        largest = new
    return result, total, largest


@triton.jit
def store_rows(
    out,
    maxima,
    sums,
    at,
    real,
    result,
    total,
    largest,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Store what `stream_keys` returned for a block of rows at places `at` of `Parts`; normalised unless SPLIT."""
    dim = tl.arange(0, BLOCK_VALUE)
    if SPLIT:
        tl.store(maxima + at, largest, mask=real)
        tl.store(sums + at, total, mask=real)
    else:
        result = result / total[:, None]
    tl.store(
        out + at[:, None] * VALUE_DIM + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & (dim < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["n_pairs", "splits"])
def combine(
    parts,
    maxima,
    sums,
    out,
    n_pairs,
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Put the parts of one (row, head) pair together."""
    pair = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_VALUE)
    inside = dim < VALUE_DIM
    largest = tl.load(maxima + pair)
    for split in range(1, splits):
        largest = tl.maximum(largest, tl.load(maxima + split * n_pairs + pair))
    result = tl.zeros([BLOCK_VALUE], tl.float32)
    total = 0.0
    for split in range(splits):
        at = split * n_pairs + pair
        weight = tl.exp2(tl.load(maxima + at) - largest)
        total += tl.load(sums + at) * weight
        result += tl.load(parts + at * VALUE_DIM + dim, mask=inside, other=0.0) * weight
    tl.store(out + pair * VALUE_DIM + dim, (result / total).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Parts:
    """Where programs leave what they found: the output itself, or a part of it for each split of the keys.

    Attributes:
        results: the output, or `[splits, R, Hq, Dv]` float32 unnormalised sums.
        maxima, sums: `[splits, R, Hq]` float32, not looked at unless split.
        splits: how many.
    """

    results: Tensor
    maxima: Tensor
    sums: Tensor
    splits: int

    @classmethod
    def of(cls, out: Tensor, splits: int) -> Parts:
        """Make room for the parts of an output `[.., Hq, Dv]`."""
        if splits == 1:
            return cls(out, out, out, splits)
        shape = (splits, out.numel() // out.shape[-1])
        results = torch.empty(*shape, out.shape[-1], dtype=torch.float32, device=out.device)
        maxima, sums = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
        return cls(results, maxima, sums, splits)

    def combine(self, out: Tensor) -> None:
        """Put the parts together, if there are several."""
        if self.splits > 1:
            pairs, dim = out.numel() // out.shape[-1], out.shape[-1]
            combine[(pairs,)](
                self.results,
                self.maxima,
                self.sums,
                out,
                pairs,
                self.splits,
                VALUE_DIM=dim,
                BLOCK_VALUE=block_dim(dim),
            )


def constants(
    query: Tensor, value_dim: int, softcap: float | None, window: int | None, sinks: Tensor | None, splits: int
) -> dict[str, Any]:
    """Return what kernels that attend are compiled for."""
    dim = query.shape[-1]
    return {
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": block_dim(dim),
        "BLOCK_VALUE": block_dim(value_dim),
        "BLOCK_KEYS": keys_at_once(query.dtype, max(dim, value_dim)),
        "CAPPED": softcap is not None,
        "WINDOWED": window is not None,
        "SINKS": sinks is not None,
        "SPLIT": splits > 1,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }
