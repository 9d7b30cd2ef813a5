"""Attention of several requests together: one launch writes their fresh keys and values, one or two attend.

Each request has its own buffer of keys and values. A table in device memory holds the addresses, so the number of
launches does not grow with the requests, and a CUDA graph serves whichever requests the table names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.kernels.attend import TABLE_COLUMNS
from qcfuse_rag.runtime.kernels.launch import (
    Tile,
    block_dim,
    check_operands,
    dependent_launch,
    on_device,
    triton_type,
    wait_for_inputs,
)
from qcfuse_rag.runtime.kernels.sparse_attention import launch_attention, sparse_attention_reference
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.rows import AttentionParams

ROWS_PER_PROGRAM = 16
"""Rows of one head that one program writes."""


@triton.jit(do_not_specialize=["n_rows"])
def append(
    key,
    value,
    table,
    rows,
    key_request,
    key_head,
    key_row,
    value_request,
    value_head,
    value_row,
    n_rows,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    KV_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write the fresh keys and values of one head, for a block of rows of one request."""
    wait_for_inputs(DEPENDENT)
    blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    request, head = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    active = row < n_rows
    position = tl.load(rows + request * n_rows + row, mask=active, other=0)
    entry = table + request * TABLE_COLUMNS
    keys = tl.load(entry).to(tl.pointer_type(KV_DTYPE)) + head * tl.load(entry + 2)
    values = tl.load(entry + 1).to(tl.pointer_type(KV_DTYPE)) + head * tl.load(entry + 3)
    if ALIGNED:  # a pointer loaded from a table has no known alignment, and narrow accesses are slow
        keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
    key += request * key_request + head * key_head
    value += request * value_request + head * value_head
    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    mask, value_mask = active[:, None] & (dim < DIM)[None, :], active[:, None] & (value_dim < VALUE_DIM)[None, :]
    fresh = tl.load(key + row[:, None] * key_row + dim[None, :], mask=mask)
    fresh_value = tl.load(value + row[:, None] * value_row + value_dim[None, :], mask=value_mask)
    tl.store(keys + position[:, None] * DIM + dim[None, :], fresh, mask=mask)
    tl.store(values + position[:, None] * VALUE_DIM + value_dim[None, :], fresh_value, mask=value_mask)


def append_rows(key: Tensor, value: Tensor, table: KVTable, layer: int, rows: Tensor) -> None:
    """Write `[B, Hkv, R, D]` keys and `[B, Hkv, R, Dv]` values at `[B, R]` int64 positions of each request's buffer.

    Only channels must be contiguous. Rows at the same position must hold the same values.
    """
    check_operands(table.dtype, key, value)
    shape = table.shapes[layer]
    requests, n_rows = rows.shape
    block_rows = min(ROWS_PER_PROGRAM, triton.next_power_of_2(n_rows))
    with on_device(key.device):
        append[(requests * triton.cdiv(n_rows, block_rows), shape.kv_heads)](
            key,
            value,
            table.entries[layer],
            rows,
            *key.stride()[:3],
            *value.stride()[:3],
            n_rows,
            DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            BLOCK_DIM=block_dim(shape.key_dim),
            BLOCK_VALUE=block_dim(shape.value_dim),
            BLOCK_ROWS=block_rows,
            KV_DTYPE=triton_type(key.dtype),
            ALIGNED=table.aligned,
            **dependent_launch(key.device),
        )


def table_attention(
    query: Tensor,
    table: KVTable,
    layer: int,
    rows: Tensor,
    params: AttentionParams,
    *,
    splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attend with the same number of rows of each request to the keys in its own buffer.

    Queries are `[B, Hq, R, D]`, rotated, of any strides but contiguous channels. Rows are `[B, R]` int64 positions less
    than the table's `longest`. The result is `[B, R, Hq, Dv]`. For further arguments see `sparse_attention`.
    """
    check_operands(table.dtype, query)
    return launch_attention(query, (table, layer), rows, params, splits=splits, tile=tile)


def table_attention_reference(
    query: Tensor, buffers: Sequence[KVBuffer], layer: int, rows: Tensor, params: AttentionParams
) -> Tensor:
    """Compute what `table_attention` does, request by request in float32."""
    results = []
    for request_query, buffer, positions in zip(query.split(1), buffers, rows, strict=True):
        key, value = (side[layer][:, :, : int(positions.max()) + 1] for side in (buffer.keys, buffer.values))
        results.append(sparse_attention_reference(request_query, key, value, positions, params))
    return torch.cat(results)
