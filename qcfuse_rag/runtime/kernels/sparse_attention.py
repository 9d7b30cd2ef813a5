"""Sparse-row attention: few rows at arbitrary positions against a long buffer of keys, without a mask in memory.

Keys and values are one request's tensors, or, for several requests at once and for CUDA graphs that serve any, wherever
a table in device memory says they are; see `table.py`. Where there are too few rows to fill a device, the keys are
split and the parts put together afterwards.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from qcfuse_rag.runtime.kernels.attend import attend
from qcfuse_rag.runtime.kernels.launch import (
    TALL,
    Tile,
    block_dim,
    check_extras,
    check_operands,
    fewest_tall,
    is_hopper,
    launching_on,
    tall_fits,
    tile_of,
    triton_type,
)
from qcfuse_rag.runtime.kernels.limits import TOLERANCE, relative_error
from qcfuse_rag.runtime.kernels.split_k import Parts, splits_of
from qcfuse_rag.runtime.reference_attention import explicit_attention

LOG = logging.getLogger(__name__)

ASKING = 64
"""Up to so many rows are mostly those of a question, at the prompt's end, and see about as many keys each."""


@dataclass(frozen=True, slots=True)
class Tabled:
    """Keys and values of several requests, each in memory of its own where tokens lie side by side.

    Attributes:
        entries: `[B, 4]` int64, see `COLUMNS`.
        kv_heads, value_dim: of each.
        aligned: whether all tokens begin at multiples of 16 bytes.
    """

    entries: Tensor
    kv_heads: int
    value_dim: int
    aligned: bool


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
    tile: Tile | None = None,
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
        splits: parts to split the keys into, at most `MOST_SPLITS`; by what fills the device if None.
        tile: what a program takes; by what fills the device if None.

    Returns:
        `[1, R, Hq, Dv]` in the dtype of `value`.

    Raises:
        ValueError: if operands do not fit each other or are not laid out as said.
    """
    check_operands(query, key, value, rows)
    return launch_attention(
        query,
        (key, value),
        rows[None],
        key.shape[2],
        scaling=scaling,
        softcap=softcap,
        window=window,
        sinks=sinks,
        splits=splits,
        tile=tile,
    )


def launch_attention(
    query: Tensor,
    held: tuple[Tensor, Tensor] | Tabled,
    rows: Tensor,
    longest: int,
    *,
    scaling: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
    splits: int | None,
    tile: Tile | None = None,
) -> Tensor:
    """Attend with operands that have been checked.

    Args:
        query: `[B, Hq, R, D]`.
        held: `[1, Hkv, T, D]` keys and `[1, Hkv, T, Dv]` values of the one request there is, or where to find them.
        rows: `[B, R]` int64.
        longest: keys that a row may see at most.
        scaling: see `sparse_attention`, as what follows.
        softcap: cap on scores.
        window: sliding window.
        sinks: `[Hq]` logits.
        splits: parts to split the keys into.
        tile: what a program takes.

    Returns:
        `[B, R, Hq, Dv]`.
    """
    check_extras(query, scaling, window, sinks)
    requests, n_heads, n_rows, dim = query.shape
    if isinstance(held, Tabled):
        key = value = query
        table, kv_heads, value_dim, aligned = held.entries, held.kv_heads, held.value_dim, held.aligned
    else:
        (key, value), table, aligned = held, rows, False
        kv_heads, value_dim = key.shape[1], value.shape[3]
    group = n_heads // kv_heads
    tile = tile or attention_tile(query.dtype, max(dim, value_dim), n_rows * group, kv_heads, query.device)
    programs = triton.cdiv(n_rows * group, tile.rows) * kv_heads
    if splits is None:
        seen = longest if window is None or n_rows > 1 else min(longest, window)
        uneven = window is None and n_rows > ASKING
        splits = splits_of(programs * requests, seen, query.device, warps=tile.warps, uneven=uneven)
    out = torch.empty(requests, n_rows, n_heads, value_dim, dtype=query.dtype, device=query.device)
    parts = Parts.of(out, splits)
    with launching_on(query.device):
        attend[(programs, splits, requests)](
            query,
            key,
            value,
            table,
            rows,
            query if sinks is None else sinks,
            parts.results,
            parts.maxima,
            parts.sums,
            *query.stride()[:3],
            *key.stride()[1:3],
            *value.stride()[1:3],
            n_rows,
            scaling,
            softcap or 1.0,
            window or 0,
            TABLED=isinstance(held, Tabled),
            KEPT=triton_type(query.dtype),
            ALIGNED=aligned,
            GROUP=group,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_DIM=block_dim(dim),
            BLOCK_VALUE=block_dim(value_dim),
            BLOCK_ROWS=tile.rows,
            BLOCK_KEYS=tile.keys,
            CAPPED=softcap is not None,
            WINDOWED=window is not None,
            SINKS=sinks is not None,
            SPLIT=splits > 1,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        parts.combine(out)
    return out


def attention_tile(dtype: torch.dtype, dim: int, pairs: int, kv_heads: int, device: torch.device) -> Tile:
    """Return what a program that attends takes: `TALL` where that is used and there are rows enough, else `tile_of`."""
    tall = takes_tall(device, dtype, dim) and pairs >= fewest_tall(kv_heads, device)
    return TALL if tall else tile_of(dtype, dim, pairs)


@cache
def takes_tall(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Return whether `TALL` is used on a device: a Hopper GPU where it has just been compared with its reference.

    Args:
        device: where.
        dtype: of keys and values.
        dim: channels of a head.

    Raises:
        torch.OutOfMemoryError: if there is no room to try it.
    """
    if not is_hopper(device) or not tall_fits(dtype, dim):
        return False
    generator, length = torch.Generator(device).manual_seed(0), 5 * TALL.keys + 9
    rows = torch.cat([torch.arange(4), torch.arange(length - 2 * TALL.rows, length, 2)]).to(device)
    query, key, value = (
        torch.randn(1, heads, tokens, dim, generator=generator, device=device).to(dtype)
        for heads, tokens in ((8, len(rows)), (2, length), (2, length))
    )
    try:
        for window in (None, TALL.rows):
            found = sparse_attention(query, key, value, rows, scaling=dim**-0.5, window=window, tile=TALL)
            expected = sparse_attention_reference(query, key, value, rows, scaling=dim**-0.5, window=window)
            if not relative_error(found, expected) <= TOLERANCE:
                LOG.warning("attention of many rows goes by smaller blocks: larger ones come out otherwise here")
                return False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler has many ways to refuse
        LOG.warning("attention of many rows goes by smaller blocks: %s: %s", type(error).__name__, error)
        return False
    return True


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
