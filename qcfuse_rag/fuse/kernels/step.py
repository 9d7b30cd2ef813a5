"""A decode step of several requests: one launch to write their fresh keys and values, one or two to attend.

Each request's keys and values lie in a buffer of its own. A table in device memory says where, so that the number of
launches does not grow with the requests, and a CUDA graph of a step serves whichever requests the table names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.kernels.attention import sparse_attention_reference
from qcfuse_rag.fuse.kernels.launch import block_dim, check_extras, launching_on, processors, rows_at_once
from qcfuse_rag.fuse.kernels.place import triton_type
from qcfuse_rag.fuse.kernels.streaming import KEYS_PER_SPLIT, NEVER, Parts, constants, store_rows, stream_keys
from qcfuse_rag.fuse.step_table import StepTable

COLUMNS = tl.constexpr(4)


@triton.jit
def append(
    key,
    value,
    table,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Write one head's fresh key and value of one request."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = table + request * COLUMNS
    position = tl.load(rows + request)
    keys = tl.load(place).to(tl.pointer_type(KEPT)) + head * tl.load(place + 2) + position * DIM
    values = tl.load(place + 1).to(tl.pointer_type(KEPT)) + head * tl.load(place + 3) + position * VALUE_DIM
    at = request * HEADS + head
    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    tl.store(keys + dim, tl.load(key + at * DIM + dim, mask=dim < DIM), mask=dim < DIM)
    fresh = tl.load(value + at * VALUE_DIM + value_dim, mask=value_dim < VALUE_DIM)
    tl.store(values + value_dim, fresh, mask=value_dim < VALUE_DIM)


@triton.jit(do_not_specialize=["window"])
def attend_each(
    q,
    table,
    rows,
    sinks,
    out,
    maxima,
    sums,
    scaling,
    softcap,
    window,
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
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
    """Some query heads of one key head of one request, over one part of its keys; see `attention.attend` for `out`."""
    split, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    BLOCKS: tl.constexpr = (GROUP + BLOCK_ROWS - 1) // BLOCK_ROWS
    kv_head, n_heads = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS * GROUP
    lane = tl.program_id(0) % BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = lane < GROUP
    head = kv_head * GROUP + lane
    row = tl.load(rows + request).to(tl.int32)
    position = tl.where(real, row, NEVER)
    start = 0
    if WINDOWED:
        start = (tl.maximum(row - window + 1, 0) // BLOCK_KEYS) * BLOCK_KEYS
    # Each request's own keys are shared out evenly, however long the others are.
    split_keys = tl.cdiv(tl.cdiv(row + 1 - start, tl.num_programs(1)), BLOCK_KEYS) * BLOCK_KEYS
    place = table + request * COLUMNS
    k, v = tl.load(place).to(tl.pointer_type(KEPT)), tl.load(place + 1).to(tl.pointer_type(KEPT))
    k += kv_head * tl.load(place + 2)
    v += kv_head * tl.load(place + 3)
    if ALIGNED:  # which a pointer out of a table does not say by itself, and narrow accesses are slow
        k, v = tl.multiple_of(k, 16), tl.multiple_of(v, 16)
    dim = tl.arange(0, BLOCK_DIM)
    query = tl.load(
        q + (request * n_heads + head)[:, None] * DIM + dim[None, :],
        mask=real[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    result, total, largest = stream_keys(
        query,
        k,
        v,
        sinks + head,
        position,
        real,
        DIM,
        VALUE_DIM,
        scaling,
        softcap,
        window,
        split == 0,
        start + split * split_keys,
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
    at = (split.to(tl.int64) * tl.num_programs(2) + request) * n_heads + head
    store_rows(out, maxima, sums, at, real, result, total, largest, VALUE_DIM, BLOCK_VALUE, SPLIT)


def append_step(key: Tensor, value: Tensor, table: StepTable, layer: int, rows: Tensor) -> None:
    """Write each request's fresh key and value into its buffer.

    Args:
        key: `[B, Hkv, 1, D]`, rotated.
        value: `[B, Hkv, 1, Dv]`.
        table: where the buffers are.
        layer: which.
        rows: `[B]` int64 positions.

    Raises:
        ValueError: if operands do not fit each other.
    """
    entries, shape = _entries(key, table, layer, rows), table.shapes[layer]
    if key.shape[1] != shape.kv_heads or value.shape != (*key.shape[:3], shape.value_dim) or value.dtype != key.dtype:
        raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} do not go into buffers of {shape}")
    heads, dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
    with launching_on(key.device):
        append[(len(key), heads)](
            key.contiguous(),
            value.contiguous(),
            entries,
            rows,
            HEADS=heads,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_DIM=block_dim(dim),
            BLOCK_VALUE=block_dim(value_dim),
            KEPT=triton_type(key.dtype),
        )


def step_attention(
    query: Tensor,
    table: StepTable,
    layer: int,
    rows: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attend with one row of each request to the keys in its own buffer.

    Args:
        query: `[B, Hq, 1, D]`, rotated.
        table: where the buffers are; Hq is a multiple of the heads there.
        layer: which.
        rows: `[B]` int64 positions less than the table's `longest`; a row sees the keys up to itself.
        scaling: factor on scores.
        softcap: cap on scores through tanh, or None.
        window: sliding window in tokens, or None.
        sinks: `[Hq]` logits that take part in the softmax only, or None.
        splits: parts to split the keys into; by what fills the device if None.

    Returns:
        `[B, 1, Hq, Dv]` in the dtype of `query`.

    Raises:
        ValueError: if operands do not fit each other.
    """
    entries = _entries(query, table, layer, rows)
    requests, n_heads = query.shape[:2]
    kv_heads, value_dim, longest = table.shapes[layer].kv_heads, table.shapes[layer].value_dim, table.longest
    if n_heads % kv_heads:
        raise ValueError(f"{n_heads} query heads over {kv_heads} key heads")
    check_extras(query, window, sinks)
    if splits is None:
        splits = max(1, min(processors(query.device) // (kv_heads * requests), longest // KEYS_PER_SPLIT))
    out = torch.empty(requests, 1, n_heads, value_dim, dtype=query.dtype, device=query.device)
    parts, group = Parts.of(out, splits), n_heads // kv_heads
    block_rows = rows_at_once(query.dtype, group)
    with launching_on(query.device):
        attend_each[(kv_heads * triton.cdiv(group, block_rows), splits, requests)](
            query.contiguous(),
            entries,
            rows,
            query if sinks is None else sinks,
            parts.results,
            parts.maxima,
            parts.sums,
            scaling,
            softcap or 1.0,
            window or 0,
            KEPT=triton_type(query.dtype),
            ALIGNED=table.aligned,
            GROUP=group,
            BLOCK_ROWS=block_rows,
            **constants(query, value_dim, softcap, window, sinks, splits),
        )
        parts.combine(out)
    return out


def step_attention_reference(
    query: Tensor,
    buffers: Sequence[KVBuffer],
    layer: int,
    rows: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return what `step_attention` does, request by request in float32."""
    found = []
    for own, buffer, row in zip(query.split(1), buffers, rows.tolist(), strict=True):
        key, value = (side[layer][:, :, : row + 1] for side in (buffer.keys, buffer.values))
        at = torch.tensor([row], device=query.device)
        found.append(
            sparse_attention_reference(
                own, key, value, at, scaling=scaling, softcap=softcap, window=window, sinks=sinks
            )
        )
    return torch.cat(found)


def _entries(fresh: Tensor, table: StepTable, layer: int, rows: Tensor) -> Tensor:
    """Return a layer's part of a table, after checking that it is of the requests that fresh rows are of."""
    entries = table.entries[layer]
    if fresh.dim() != 4 or fresh.shape[2] != 1 or fresh.shape[3] != table.shapes[layer].key_dim:
        raise ValueError(f"a step has one row of each request, got {tuple(fresh.shape)}")
    if entries.shape != (len(fresh), COLUMNS.value) or entries.dtype != torch.int64 or not entries.is_contiguous():
        raise ValueError(
            f"a table of {len(fresh)} requests must be [{len(fresh)}, 4] int64, got {tuple(entries.shape)}"
        )
    if rows.shape != (len(fresh),) or rows.dtype != torch.int64 or not rows.is_contiguous():
        raise ValueError(f"rows must be [{len(fresh)}] int64, got {tuple(rows.shape)} {rows.dtype}")
    if fresh.dtype != table.dtype:
        raise ValueError(f"a step of {fresh.dtype} over buffers of {table.dtype}")
    if not entries.device == rows.device == fresh.device:
        raise ValueError(f"the table is on {entries.device}, rows on {rows.device}, and the rest on {fresh.device}")
    return entries
