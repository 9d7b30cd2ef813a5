"""Sparse-row attention: few rows at arbitrary positions against a long buffer of keys, without a mask in memory.

A streaming softmax (`streaming.py`) with two changes. A row knows its position in the
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
from qcfuse_rag.fuse.kernels.launch import (
    check_extras,
    check_operands,
    keys_at_once,
    launching_on,
    processors,
    rows_at_once,
)
from qcfuse_rag.fuse.kernels.streaming import KEYS_PER_SPLIT, NEVER, Parts, constants, store_rows, stream_keys


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

    dim = tl.arange(0, BLOCK_DIM)
    query = tl.load(
        q + head[:, None].to(tl.int64) * q_head + row[:, None].to(tl.int64) * q_row + dim[None, :],
        mask=real[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    result, total, largest = stream_keys(
        query,
        k + kv_head.to(tl.int64) * k_head,
        v + kv_head.to(tl.int64) * v_head,
        sinks + head,
        position,
        real,
        k_token,
        v_token,
        scaling,
        softcap,
        window,
        split == 0,
        split * split_keys,
        split_keys,
        DIM,
        VALUE_DIM,
        BLOCK_DIM,
        BLOCK_VALUE,
        BLOCK_ROWS,
        BLOCK_KEYS,
        CAPPED,
        WINDOWED,
        SINKS,
        PRECISION,
    )
    n_heads = tl.num_programs(1) * GROUP
    at = (split.to(tl.int64) * n_rows + row) * n_heads + head
    store_rows(out, maxima, sums, at, real, result, total, largest, VALUE_DIM, BLOCK_VALUE, SPLIT)


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
    check_extras(query, window, sinks)
    n_heads, n_rows, dim = query.shape[1:]
    kv_heads, n_keys, value_dim = value.shape[1:]
    group = n_heads // kv_heads
    block_rows = rows_at_once(query.dtype, n_rows * group)
    block_keys = keys_at_once(query.dtype, max(dim, value_dim))  # as `constants` has it
    blocks = triton.cdiv(n_rows * group, block_rows)
    if splits is None:
        wanted = processors(query.device) // (blocks * kv_heads)
        splits = max(1, min(wanted, n_keys // KEYS_PER_SPLIT))
    split_keys = triton.cdiv(triton.cdiv(n_keys, splits), block_keys) * block_keys
    splits = triton.cdiv(n_keys, split_keys)
    out = torch.empty(1, n_rows, n_heads, value_dim, dtype=value.dtype, device=value.device)
    parts = Parts.of(out, splits)
    with launching_on(query.device):
        attend[(blocks, kv_heads, splits)](
            query,
            key,
            value,
            rows,
            query if sinks is None else sinks,
            parts.results,
            parts.maxima,
            parts.sums,
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
            BLOCK_ROWS=block_rows,
            **constants(query, value_dim, softcap, window, sinks, splits),
        )
        parts.combine(out)
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
