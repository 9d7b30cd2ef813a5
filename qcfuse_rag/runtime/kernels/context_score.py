"""Context scores: the share of the rows' attention that each key gets, without a rows x keys matrix in memory.

There are two passes over the keys. The first computes the logarithm of each row's softmax denominator. A question's few
rows do not fill a device, so each program reads only a part of the keys. The second pass combines the parts and sums
the weights of every key over rows and heads. Both sum in a fixed order, so the same prompt always gets the same scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.runtime.kernels.attend import NO_POSITION, exp2_scale, raw_scores
from qcfuse_rag.runtime.kernels.launch import block_dim, check_operands, default_tile, on_device
from qcfuse_rag.runtime.kernels.split_k import FEW_SPLITS, num_splits
from qcfuse_rag.runtime.rows import AttentionParams


@triton.jit(do_not_specialize=["n_rows", "window"])
def denominators(
    q,
    k,
    rows,
    known,
    logs,
    q_head,
    q_row,
    k_head,
    k_token,
    n_rows,
    scaling,
    softcap,
    window,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store log2 of the softmax denominators of one block of (row, query head) pairs of one key head.

    A program sums over one part of the keys: `logs` is `[splits, Hq, R]`.
    """
    kv_head, split = tl.program_id(1), tl.program_id(2)
    pair = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    active = pair < n_rows * GROUP
    row, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    position = tl.load(rows + row, mask=active, other=NO_POSITION).to(tl.int32)
    stop = tl.max(position, 0) + 1
    start = 0
    if WINDOWED:
        first_seen = tl.min(tl.where(active, position, 2147483647), 0) - window + 1
        start = (tl.maximum(first_seen, 0) // BLOCK_KEYS) * BLOCK_KEYS
    split_keys = tl.cdiv(tl.cdiv(stop - start, tl.num_programs(2)), BLOCK_KEYS) * BLOCK_KEYS
    start += split * split_keys
    stop = tl.minimum(start + split_keys, stop)
    dim = tl.arange(0, BLOCK_DIM)
    query = tl.load(
        q + head[:, None].to(tl.int64) * q_head + row[:, None].to(tl.int64) * q_row + dim[None, :],
        mask=active[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    k += kv_head.to(tl.int64) * k_head
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    scale = exp2_scale(scaling, softcap, CAPPED)
    for block_start in range(start, stop, BLOCK_KEYS):
        token = block_start + tl.arange(0, BLOCK_KEYS)
        valid = tl.load(known + token, mask=token < stop, other=0) != 0
        key = tl.load(
            k + token[None, :].to(tl.int64) * k_token + dim[:, None],
            mask=valid[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        seen = valid[None, :] & (token[None, :] <= position[:, None])
        if WINDOWED:
            seen &= position[:, None] - token[None, :] < window
        score = tl.where(seen, raw_scores(query, key, scaling, softcap, CAPPED, PRECISION), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1) * scale)
        subtracted = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp2(largest - subtracted) + tl.sum(tl.exp2(score * scale - subtracted[:, None]), 1)
        largest = new_largest
    index = (split.to(tl.int64) * tl.num_programs(1) * GROUP + head) * n_rows + row
    tl.store(logs + index, largest + tl.log2(total), mask=active)


@triton.jit(do_not_specialize=["n_rows", "n_keys", "splits", "window"])
def weights_of_keys(
    q,
    k,
    rows,
    known,
    logs,
    out,
    q_head,
    q_row,
    k_head,
    k_token,
    n_rows,
    n_keys,
    splits,
    scaling,
    softcap,
    window,
    factor,
    BLOCK_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    LARGEST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store the sum, or the maximum, of the weights that one block of keys gets from all rows, times a factor."""
    kv_head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    valid = tl.load(known + token, mask=token < n_keys, other=0) != 0
    dim = tl.arange(0, BLOCK_DIM)
    key = tl.load(
        k + kv_head.to(tl.int64) * k_head + token[None, :].to(tl.int64) * k_token + dim[:, None],
        mask=valid[None, :] & (dim < DIM)[:, None],
        other=0.0,
    )
    split, n_heads = tl.arange(0, BLOCK_SPLITS), tl.num_programs(1) * GROUP
    result = tl.zeros([BLOCK_KEYS], tl.float32)
    scale = exp2_scale(scaling, softcap, CAPPED)
    for block_start in range(0, n_rows * GROUP, BLOCK_ROWS):
        pair = block_start + tl.arange(0, BLOCK_ROWS)
        active = pair < n_rows * GROUP
        row, head = pair // GROUP, kv_head * GROUP + pair % GROUP
        position = tl.load(rows + row, mask=active, other=NO_POSITION).to(tl.int32)
        query = tl.load(
            q + head[:, None].to(tl.int64) * q_head + row[:, None].to(tl.int64) * q_row + dim[None, :],
            mask=active[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        seen = valid[None, :] & (token[None, :] <= position[:, None])
        if WINDOWED:
            seen &= position[:, None] - token[None, :] < window
        score = tl.where(seen, raw_scores(query, key, scaling, softcap, CAPPED, PRECISION), float("-inf"))
        parts = tl.load(
            logs + (split.to(tl.int64)[:, None] * n_heads + head[None, :]) * n_rows + row[None, :],
            mask=(split < splits)[:, None] & active[None, :],
            other=float("-inf"),
        )
        largest_part = tl.where(active, tl.max(parts, 0), 0.0)
        log_denominator = tl.where(
            active, largest_part + tl.log2(tl.sum(tl.exp2(parts - largest_part[None, :]), 0)), 0.0
        )
        weight = tl.exp2(score * scale - log_denominator[:, None])
        result = tl.maximum(result, tl.max(weight, 0)) if LARGEST else result + tl.sum(weight, 0)
    tl.store(out + kv_head.to(tl.int64) * n_keys + token, result * factor, mask=token < n_keys)


def context_scores(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    known: Tensor,
    params: AttentionParams,
    *,
    reduce: str = "mean",
    splits: int | None = None,
) -> Tensor:
    """Return `[T]` float32, the attention that each key gets; see `runtime.attention.scores.attention_weights`.

    The reference is `runtime.reference_attention.plain_attention_weights`. Each row must see at least one `known` key.
    Keys are split into at most `FEW_SPLITS` parts; None chooses enough to fill the device.

    Raises:
        ValueError: if dtypes or layouts of operands do not match.
    """
    check_operands(query.dtype, query, key)
    window = params.window
    n_heads, n_rows, dim = query.shape[1:]
    kv_heads, n_keys = key.shape[1:3]
    group = n_heads // kv_heads
    tile = default_tile(query.dtype, dim, n_rows * group)
    shared = {
        "GROUP": group,
        "DIM": dim,
        "BLOCK_DIM": block_dim(dim),
        "BLOCK_ROWS": tile.rows,
        "BLOCK_KEYS": tile.keys,
        "CAPPED": params.softcap is not None,
        "WINDOWED": window is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    strides = (query.stride(1), query.stride(2), key.stride(1), key.stride(2))
    score_settings = (params.scaling, params.softcap or 1.0, window or 0)
    blocks = triton.cdiv(n_rows * group, tile.rows)
    if splits is None:
        seen = n_keys if window is None else min(n_keys, n_rows + window)  # if rows are adjacent
        splits = num_splits(blocks * kv_heads, seen, key.device, most=FEW_SPLITS)
    logs = torch.empty(splits, n_heads, n_rows, dtype=torch.float32, device=key.device)
    out = torch.empty(kv_heads, n_keys, dtype=torch.float32, device=key.device)
    largest = reduce == "max"
    with on_device(key.device):
        denominators[(blocks, kv_heads, splits)](
            query, key, rows, known, logs, *strides, n_rows, *score_settings, **shared
        )
        weights_of_keys[(triton.cdiv(n_keys, tile.keys), kv_heads)](
            query,
            key,
            rows,
            known,
            logs,
            out,
            *strides,
            n_rows,
            n_keys,
            splits,
            *score_settings,
            1.0 if largest else 1 / (n_heads * n_rows),
            BLOCK_SPLITS=1 if splits == 1 else FEW_SPLITS,
            LARGEST=largest,
            **shared,
        )
    return out.amax(0) if largest else out.sum(0)
