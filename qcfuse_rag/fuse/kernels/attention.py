"""Sparse-row attention: few rows at arbitrary positions against a long buffer of keys, without a mask in memory.

Streaming softmax (Dao et al., FlashAttention-2, arXiv 2307.08691) with two changes. A row knows its position in the
prompt, so what it may see is compared in registers, and a block of rows stops at the last key any of them sees. The
query heads that share a key head lie along the rows, so a key is read once for all of them. Where there are too few
rows to fill a device, the keys are split and the parts put together afterwards (flash decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.fuse.attention import explicit_attention
from qcfuse_rag.fuse.kernels.launch import block_dim, check_operands, launching_on, processors

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


@triton.jit(do_not_specialize=["n_rows", "window", "split_keys"])
def attend(
    q,
    k,
    v,
    rows,
    sinks,
    out,
    maxima,
    sums,
    q_head,
    q_row,
    k_head,
    k_token,
    v_head,
    v_token,
    n_rows,
    scaling,
    softcap,
    window,
    split_keys,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of (row, query head) pairs of one key head, over one part of the keys.

    `out` is `[splits, R, Hq, Dv]`: the result without SPLIT, unnormalised float32 sums with it.
    """
    kv_head, split = tl.program_id(1), tl.program_id(2)
    pair = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = pair < n_rows * GROUP
    row, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    position = tl.load(rows + row, mask=real, other=NEVER).to(tl.int32)

    start = split * split_keys
    stop = tl.minimum(start + split_keys, tl.max(position, 0) + 1)
    if WINDOWED:
        first = tl.min(tl.where(real, position, 2147483647), 0) - window + 1
        start = tl.maximum(start, (tl.maximum(first, 0) // BLOCK_KEYS) * BLOCK_KEYS)

    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    query = tl.load(
        q + head[:, None].to(tl.int64) * q_head + row[:, None].to(tl.int64) * q_row + dim[None, :],
        mask=real[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    if SINKS:  # a logit of the softmax that has no value: it counts once, in the first part
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
        largest = tl.where(split == 0, sink, largest)
        total = tl.where(split == 0, 1.0, total)
    result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    k += kv_head.to(tl.int64) * k_head
    v += kv_head.to(tl.int64) * v_head
    for begin in range(start, stop, BLOCK_KEYS):
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

    n_heads = tl.num_programs(1) * GROUP
    at = (split.to(tl.int64) * n_rows + row) * n_heads + head
    if SPLIT:
        tl.store(maxima + at, largest, mask=real)
        tl.store(sums + at, total, mask=real)
    else:
        result = result / total[:, None]
    tl.store(
        out + at[:, None] * VALUE_DIM + value_dim[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
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


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attend with rows at arbitrary positions; index of a key equals its position.

    Args:
        query: `[1, Hq, R, D]`, rotated, of any strides but for its last dimension.
        key: `[1, Hkv, T, D]`, rotated, a view into a request's buffer; Hq is a multiple of Hkv.
        value: `[1, Hkv, T, Dv]`.
        rows: `[R]` int64 ascending positions less than T; a row sees the keys up to itself.
        scaling: factor on scores.
        softcap: cap on scores through tanh, or None.
        window: sliding window in tokens, or None.
        sinks: `[Hq]` logits that take part in the softmax only, or None.
        splits: parts to split the keys into; by what fills the device if None.

    Returns:
        `[1, R, Hq, Dv]` in the dtype of `value`.

    Raises:
        ValueError: if operands do not fit each other or are not laid out as said.
    """
    check_operands(query, key, value, rows)
    if sinks is not None and (sinks.shape != query.shape[1:2] or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be [{query.shape[1]}], got {tuple(sinks.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    n_heads, n_rows, dim = query.shape[1:]
    kv_heads, n_keys, value_dim = value.shape[1:]
    group = n_heads // kv_heads
    block_rows = min(64, max(16, triton.next_power_of_2(n_rows * group)))
    block_keys = 64 if max(dim, value_dim) <= 128 else 32
    blocks = triton.cdiv(n_rows * group, block_rows)
    if splits is None:
        wanted = processors(query.device) // (blocks * kv_heads)
        splits = max(1, min(wanted, n_keys // KEYS_PER_SPLIT))
    split_keys = triton.cdiv(triton.cdiv(n_keys, splits), block_keys) * block_keys
    splits = triton.cdiv(n_keys, split_keys)
    out = torch.empty(1, n_rows, n_heads, value_dim, dtype=value.dtype, device=value.device)
    parts, maxima, sums = out, out, out  # not looked at unless split
    if splits > 1:
        shape = (splits, n_rows, n_heads)
        parts = torch.empty(*shape, value_dim, dtype=torch.float32, device=out.device)
        maxima, sums = (torch.empty(shape, dtype=torch.float32, device=out.device) for _ in range(2))
    with launching_on(query.device):
        attend[(blocks, kv_heads, splits)](
            query,
            key,
            value,
            rows,
            query if sinks is None else sinks,
            parts,
            maxima,
            sums,
            query.stride(1),
            query.stride(2),
            key.stride(1),
            key.stride(2),
            value.stride(1),
            value.stride(2),
            n_rows,
            scaling,
            softcap or 1.0,
            window or 0,
            split_keys,
            GROUP=group,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_DIM=block_dim(dim),
            BLOCK_VALUE=block_dim(value_dim),
            BLOCK_ROWS=block_rows,
            BLOCK_KEYS=block_keys,
            CAPPED=softcap is not None,
            WINDOWED=window is not None,
            SINKS=sinks is not None,
            SPLIT=splits > 1,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=2,
        )
        if splits > 1:
            pairs = n_rows * n_heads
            combine[(pairs,)](
                parts, maxima, sums, out, pairs, splits, VALUE_DIM=value_dim, BLOCK_VALUE=block_dim(value_dim)
            )
    return out


def sparse_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return what `sparse_attention` does, in float32 and with a mask; see there."""
    distance = rows[:, None] - torch.arange(key.shape[2], device=key.device)[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return explicit_attention(query.float(), key.float(), value.float(), seen, scaling, softcap, sinks).transpose(1, 2)
