"""The attention kernel: a streaming softmax of a block of rows over one part of the keys they may see.

The streaming softmax is that of Dao et al., FlashAttention-2 (arXiv 2307.08691). It differs from that kernel in three
ways. (1) Each row has its own position; the kernel computes the causal mask from it. (2) A block of rows stops at the
last key that any of its rows sees; keys that all rows see are not masked. With a window every key is masked. (3) Query
heads that share a key head are rows of one block, so each key is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qcfuse_rag.runtime.kernels.launch import wait_for_inputs

TABLE_COLUMNS = tl.constexpr(4)
"""Columns of a KV table: pointers to keys and to values, strides between heads of keys and of values."""
LOG2_E = tl.constexpr(1.4426950408889634)
NO_POSITION = tl.constexpr(-1)
"""Position of padding rows: they see no key."""


@triton.jit
def raw_scores(query, key, scaling, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Return unscaled scores. `exp2_scale` is applied later, in one operation with the subtraction of the maximum."""
    score = tl.dot(query, key, input_precision=PRECISION)
    if CAPPED:
        score = 1.0 - 2.0 / (tl.exp(2.0 * scaling / softcap * score) + 1.0)  # tanh
    return score


@triton.jit
def exp2_scale(scaling, softcap, CAPPED: tl.constexpr):
    """Return the factor, above 0, that turns raw scores into exponents of 2."""
    return (softcap if CAPPED else scaling) * LOG2_E


@triton.jit
def attend_keys(
    query,
    keys,
    values,
    key_stride,
    value_stride,
    position,
    start,
    stop,
    largest,
    total,
    result,
    scaling,
    softcap,
    window,
    ALL_SEEN: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the keys from `start` up to `stop` to a streaming softmax and return its state: largest, total, result.

    With ALL_SEEN every row sees all of these keys, and their number is a multiple of BLOCK_KEYS.
    """
    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    scale = exp2_scale(scaling, softcap, CAPPED)
    for block_start in range(start, stop, BLOCK_KEYS):
        token = block_start + tl.arange(0, BLOCK_KEYS)
        valid = tl.full([BLOCK_KEYS], 1, tl.int1) if ALL_SEEN else token < stop
        key = tl.load(
            keys + token[None, :].to(tl.int64) * key_stride + dim[:, None],
            mask=valid[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        score = raw_scores(query, key, scaling, softcap, CAPPED, PRECISION)
        if not ALL_SEEN:
            seen = valid[None, :] & (token[None, :] <= position[:, None])
            if WINDOWED:
                seen &= position[:, None] - token[None, :] < window
            score = tl.where(seen, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1) * scale)
        # 0 for rows that have seen no key so far
        subtracted = new_largest if ALL_SEEN else tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score * scale - subtracted[:, None])
        decay = tl.exp2(largest - subtracted)
        value = tl.load(
            values + token[:, None].to(tl.int64) * value_stride + value_dim[None, :],
            mask=valid[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        result = result * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        total = total * decay + tl.sum(weight, 1)
        largest = new_largest
    return largest, total, result


@triton.jit(do_not_specialize=["n_rows", "window"])
def attend(
    q,
    k,
    v,
    table,
    rows,
    sinks,
    out,
    maxima,
    sums,
    q_request,
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
    BY_TABLE: tl.constexpr,
    KV_DTYPE: tl.constexpr,
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
    DEPENDENT: tl.constexpr,
):
    """Attend with one block of (row, query head) pairs of one key head of one request, over one part of its keys.

    `out` is `[splits, B, R, Hq, Dv]`: the normalised result, or with SPLIT unnormalised float32 sums.
    """
    wait_for_inputs(DEPENDENT)
    split, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.cdiv(n_rows * GROUP, BLOCK_ROWS)
    kv_heads = tl.num_programs(0) // blocks
    kv_head, n_heads = tl.program_id(0) % kv_heads, kv_heads * GROUP
    # The last rows see the most keys. They start first, so that no long program runs alone at the end.
    pair = (blocks - 1 - tl.program_id(0) // kv_heads) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    active = pair < n_rows * GROUP
    row, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    position = tl.load(rows + request * n_rows + row, mask=active, other=NO_POSITION).to(tl.int32)
    start, seen_by_all, stop = 0, tl.min(tl.where(active, position, 2147483647), 0) + 1, tl.max(position, 0) + 1
    if WINDOWED:
        start = (tl.maximum(seen_by_all - window, 0) // BLOCK_KEYS) * BLOCK_KEYS
    # The keys that these rows see are divided evenly, whatever other blocks see.
    split_keys = tl.cdiv(tl.cdiv(stop - start, tl.num_programs(1)), BLOCK_KEYS) * BLOCK_KEYS
    start += split * split_keys
    stop = tl.minimum(start + split_keys, stop)
    if BY_TABLE:
        entry = table + request * TABLE_COLUMNS
        keys = tl.load(entry).to(tl.pointer_type(KV_DTYPE)) + kv_head * tl.load(entry + 2)
        values = tl.load(entry + 1).to(tl.pointer_type(KV_DTYPE)) + kv_head * tl.load(entry + 3)
        if ALIGNED:  # a pointer loaded from a table has no known alignment, and narrow accesses are slow
            keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
        key_stride, value_stride = DIM, VALUE_DIM
    else:
        keys, values = k + kv_head.to(tl.int64) * k_head, v + kv_head.to(tl.int64) * v_head
        key_stride, value_stride = k_token, v_token

    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    query = tl.load(
        q + request * q_request + (head.to(tl.int64) * q_head + row.to(tl.int64) * q_row)[:, None] + dim[None, :],
        mask=active[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    if SINKS:  # a softmax logit without a value: it counts once, in the first part
        sink = tl.load(sinks + head, mask=active, other=0.0).to(tl.float32) * LOG2_E
        largest = tl.where(split == 0, sink, largest)
        total = tl.where(split == 0, 1.0, total)
    result = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    # First the keys that all of these rows see, then the rest. With a window few keys are common to all rows.
    common_keys = 0 if WINDOWED else tl.maximum(tl.minimum(seen_by_all, stop) - start, 0) // BLOCK_KEYS * BLOCK_KEYS
    common_stop = start + common_keys
    for part in tl.static_range(1 if WINDOWED else 0, 2):
        largest, total, result = attend_keys(
            query,
            keys,
            values,
            key_stride,
            value_stride,
            position,
            start if part == 0 else common_stop,
            common_stop if part == 0 else stop,
            largest,
            total,
            result,
            scaling,
            softcap,
            window,
            ALL_SEEN=part == 0,
            DIM=DIM,
            VALUE_DIM=VALUE_DIM,
            BLOCK_DIM=BLOCK_DIM,
            BLOCK_VALUE=BLOCK_VALUE,
            BLOCK_KEYS=BLOCK_KEYS,
            CAPPED=CAPPED,
            WINDOWED=WINDOWED,
            PRECISION=PRECISION,
        )
    index = ((split.to(tl.int64) * tl.num_programs(2) + request) * n_rows + row) * n_heads + head
    if SPLIT:
        tl.store(maxima + index, largest, mask=active)
        tl.store(sums + index, total, mask=active)
    else:
        result = result / total[:, None]
    tl.store(
        out + index[:, None] * VALUE_DIM + value_dim[None, :],
        result.to(out.dtype.element_ty),
        mask=active[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
