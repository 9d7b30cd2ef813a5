"""Sparse-row attention: few rows at arbitrary positions against a long buffer of keys, without a mask in memory.

Keys and values are the tensors of one request. For several requests at once, and for CUDA graphs that serve any
request, a table in device memory holds their addresses; see `table_attention`. Where rows are too few to fill a device,
the keys are split and the parts combined afterwards.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.kernels.attend import attend
from qcfuse_rag.runtime.kernels.launch import (
    LARGE_TILE,
    Tile,
    block_dim,
    check_operands,
    default_tile,
    dependent_launch,
    holds_large_tile,
    large_tile_fits,
    min_rows_for_large_tile,
    on_device,
    triton_type,
)
from qcfuse_rag.runtime.kernels.limits import TOLERANCE, relative_error
from qcfuse_rag.runtime.kernels.split_k import allocate_parts, combine_parts, num_splits
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.reference_attention import explicit_attention, seen_keys
from qcfuse_rag.runtime.rows import AttentionParams

LOG = logging.getLogger(__name__)

QUESTION_ROWS = 64
"""Up to this number, rows are mostly a question's at the end of the prompt, and see about as many keys each."""


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    params: AttentionParams,
    *,
    splits: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attend with rows at arbitrary positions; the index of a key is its position.

    Args:
        query: `[1, Hq, R, D]`, rotated; any strides, but contiguous channels.
        key: `[1, Hkv, T, D]`, rotated, a view into a request's buffer; Hq is a multiple of Hkv.
        value: `[1, Hkv, T, Dv]`.
        rows: `[R]` int64 ascending positions less than T; a row sees the keys up to itself.
        params: how the layer computes scores.
        splits: parts to split the keys into, at most `MAX_SPLITS`; None fills the device, and so for `tile`.
        tile: block size of a program.

    Returns:
        `[1, R, Hq, Dv]` in the dtype of `value`.

    Raises:
        ValueError: if dtypes or layouts of operands do not match.
    """
    check_operands(query.dtype, query, key, value)
    return launch_attention(query, (key, value), rows[None].contiguous(), params, splits=splits, tile=tile)


def launch_attention(
    query: Tensor,
    kv: tuple[Tensor, Tensor] | tuple[KVTable, int],
    rows: Tensor,
    params: AttentionParams,
    *,
    splits: int | None,
    tile: Tile | None = None,
) -> Tensor:
    """Launch the attention kernel on checked operands; return `[B, R, Hq, Dv]`.

    `kv` holds the `[1, Hkv, T, D]` keys and `[1, Hkv, T, Dv]` values of a single request, or is a layer of a table of
    several.
    """
    window, sinks = params.window, params.sinks
    requests, n_heads, n_rows, dim = query.shape
    source: Tensor | KVTable
    rest: Any
    source, rest = kv
    if isinstance(source, KVTable):
        key = value = query
        table, shape = source.entries[rest], source.shapes[rest]
        kv_heads, value_dim, longest, aligned = shape.kv_heads, shape.value_dim, source.longest, source.aligned
    else:
        key, value, table, aligned = source, rest, rows, False
        kv_heads, value_dim, longest = key.shape[1], value.shape[3], key.shape[2]
    group = n_heads // kv_heads
    tile = tile or attention_tile(query.dtype, max(dim, value_dim), n_rows * group, kv_heads, query.device)
    programs = triton.cdiv(n_rows * group, tile.rows) * kv_heads
    if splits is None:
        visible = longest if window is None or n_rows > 1 else min(longest, window)
        uneven = window is None and n_rows > QUESTION_ROWS
        splits = num_splits(programs * requests, visible, query.device, warps=tile.warps, uneven=uneven)
    out = torch.empty(requests, n_rows, n_heads, value_dim, dtype=query.dtype, device=query.device)
    results, maxima, sums = allocate_parts(out, splits)
    with on_device(query.device):
        attend[(programs, splits, requests)](
            query,
            key,
            value,
            table,
            rows,
            query if sinks is None else sinks,
            results,
            maxima,
            sums,
            *query.stride()[:3],
            *key.stride()[1:3],
            *value.stride()[1:3],
            n_rows,
            params.scaling,
            params.softcap or 1.0,
            window or 0,
            BY_TABLE=isinstance(source, KVTable),
            KV_DTYPE=triton_type(query.dtype),
            ALIGNED=aligned,
            GROUP=group,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_DIM=block_dim(dim),
            BLOCK_VALUE=block_dim(value_dim),
            BLOCK_ROWS=tile.rows,
            BLOCK_KEYS=tile.keys,
            CAPPED=params.softcap is not None,
            WINDOWED=window is not None,
            SINKS=sinks is not None,
            SPLIT=splits > 1,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
            **dependent_launch(query.device),
        )
        if splits > 1:
            combine_parts(results, maxima, sums, out)
    return out


def attention_tile(dtype: torch.dtype, dim: int, pairs: int, kv_heads: int, device: torch.device) -> Tile:
    """Return `LARGE_TILE` where it is supported and there are enough rows, else `default_tile`."""
    use_large = supports_large_tile(device, dtype, dim) and pairs >= min_rows_for_large_tile(kv_heads, device)
    return LARGE_TILE if use_large else default_tile(dtype, dim, pairs)


@cache
def supports_large_tile(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Return whether `LARGE_TILE` fits `dim` channels of a head and agrees with the reference there.

    Raises:
        torch.OutOfMemoryError: if there is not enough memory for the check.
    """
    if not holds_large_tile(device) or not large_tile_fits(dtype, dim):
        return False
    generator, length = torch.Generator(device).manual_seed(0), 5 * LARGE_TILE.keys + 9
    rows = torch.cat([torch.arange(4), torch.arange(length - 2 * LARGE_TILE.rows, length, 2)]).to(device)
    query, key, value = (
        torch.randn(1, heads, tokens, dim, generator=generator, device=device).to(dtype)
        for heads, tokens in ((8, len(rows)), (2, length), (2, length))
    )
    sinks = torch.randn(8, generator=generator, device=device)
    table = KVTable.of([KVBuffer((key,), (value,))], [KVShape(2, dim, dim)], length)
    kinds = (
        (AttentionParams(dim**-0.5), 1),
        (AttentionParams(dim**-0.5, window=LARGE_TILE.rows), 1),
        (AttentionParams(dim**-0.5, softcap=20.0, sinks=sinks), 2),
    )
    try:
        for params, splits in kinds:
            expected = sparse_attention_reference(query, key, value, rows, params)
            for result in (
                sparse_attention(query, key, value, rows, params, splits=splits, tile=LARGE_TILE),
                launch_attention(query, (table, 0), rows[None], params, splits=splits, tile=LARGE_TILE),
            ):
                if not relative_error(result, expected) <= TOLERANCE:
                    raise ValueError("larger ones give other results here")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may raise anything
        LOG.warning("attention of many rows uses smaller blocks: %s: %s", type(error).__name__, error)
        return False
    return True


def sparse_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, params: AttentionParams
) -> Tensor:
    """Compute what `sparse_attention` does in float32 with a mask; the arguments are the same."""
    visible = seen_keys(rows, torch.arange(key.shape[2], device=key.device), params.window)
    return explicit_attention(query.float(), key.float(), value.float(), visible, params).transpose(1, 2)
