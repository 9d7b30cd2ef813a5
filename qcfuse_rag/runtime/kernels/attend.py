"""The kernel that attends: a streaming softmax of a block of rows over one part of the keys they may see.

Streaming softmax is Dao et al., FlashAttention-2 (arXiv 2307.08691). Two changes: a row knows its position in the
prompt, so what it may see is compared in registers, and a block of rows stops at the last key any of them sees. Keys
that all of them see are not compared: most, since rows of a block are near one another in a long prompt; with a window
all are. The query heads that share a key head lie along the rows, so a key is read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(4)
"""Of a table: pointers to keys and values, and how far apart their heads are."""
LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1)
"""Position of what is no row: sees no key."""


@triton.jit
def scores_of(query, key, scaling, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Return scores that are yet to be multiplied by `power_of`: with what is subtracted then it is one operation."""
    score = tl.dot(query, key, input_precision=PRECISION)
    if CAPPED:
        score = 1.0 - 2.0 / (tl.exp(2.0 * scaling / softcap * score) + 1.0)  # tanh
    return score


@triton.jit
def power_of(scaling, softcap, CAPPED: tl.constexpr):
    """Return what makes scores powers of two; it is above 0, so that the largest stays the largest."""
    return (softcap if CAPPED else scaling) * LOG2_E


@triton.jit
def attend_part(
    query,
    keys,
    values,
    key_apart,
    value_apart,
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
    """Take the keys from `start` up to `stop` into a streaming softmax and return it: largest, total, result.

    With ALL_SEEN every row sees all of them, and they are a multiple of BLOCK_KEYS.
    """
    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    power = power_of(scaling, softcap, CAPPED)
    for begin in range(start, stop, BLOCK_KEYS):
        token = begin + tl.arange(0, BLOCK_KEYS)
        there = tl.full([BLOCK_KEYS], 1, tl.int1) if ALL_SEEN else token < stop
        key = tl.load(
            keys + token[None, :].to(tl.int64) * key_apart + dim[:, None],
            mask=there[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        score = scores_of(query, key, scaling, softcap, CAPPED, PRECISION)
        if not ALL_SEEN:
            seen = there[None, :] & (token[None, :] <= position[:, None])
            if WINDOWED:
                seen &= position[:, None] - token[None, :] < window
            score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1) * power)
        safe = new if ALL_SEEN else tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
        weight = tl.exp2(score * power - safe[:, None])
        fade = tl.exp2(largest - safe)
        value = tl.load(
            values + token[:, None].to(tl.int64) * value_apart + value_dim[None, :],
            mask=there[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        result = result * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        total = total * fade + tl.sum(weight, 1)
        largest = new
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
    TABLED: tl.constexpr,
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
    """One block of (row, query head) pairs of one key head of one request, over one part of its keys.

    `out` is `[splits, B, R, Hq, Dv]`: the result without SPLIT, unnormalised float32 sums with it.
    """
    split, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.cdiv(n_rows * GROUP, BLOCK_ROWS)
    kv_heads = tl.num_programs(0) // blocks
    kv_head, n_heads = tl.program_id(0) % kv_heads, kv_heads * GROUP
    # The last rows see the most keys. They begin first: what begins last is what a device waits for in the end.
    pair = (blocks - 1 - tl.program_id(0) // kv_heads) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = pair < n_rows * GROUP
    row, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    position = tl.load(rows + request * n_rows + row, mask=real, other=NEVER).to(tl.int32)
    start, first, stop = 0, tl.min(tl.where(real, position, 2147483647), 0) + 1, tl.max(position, 0) + 1
    if WINDOWED:
        start = (tl.maximum(first - window, 0) // BLOCK_KEYS) * BLOCK_KEYS
    # What these rows see is shared out evenly, whatever others see.
    split_keys = tl.cdiv(tl.cdiv(stop - start, tl.num_programs(1)), BLOCK_KEYS) * BLOCK_KEYS
    start += split * split_keys
    stop = tl.minimum(start + split_keys, stop)
    if TABLED:
        place = table + request * COLUMNS
        keys = tl.load(place).to(tl.pointer_type(KEPT)) + kv_head * tl.load(place + 2)
        values = tl.load(place + 1).to(tl.pointer_type(KEPT)) + kv_head * tl.load(place + 3)
        if ALIGNED:  # which a pointer out of a table does not say by itself, and narrow accesses are slow
            keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
        key_apart, value_apart = DIM, VALUE_DIM
    else:
        keys, values = k + kv_head.to(tl.int64) * k_head, v + kv_head.to(tl.int64) * v_head
        key_apart, value_apart = k_token, v_token

    dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    query = tl.load(
        q + request * q_request + (head.to(tl.int64) * q_head + row.to(tl.int64) * q_row)[:, None] + dim[None, :],
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
    # First the keys that all of these rows see, then those that only some do. With a window there are few of the first.
    common = start if WINDOWED else start + tl.maximum(tl.minimum(first, stop) - start, 0) // BLOCK_KEYS * BLOCK_KEYS
    for part in tl.static_range(1 if WINDOWED else 0, 2):
        largest, total, result = attend_part(
            query,
            keys,
            values,
            key_apart,
            value_apart,
            position,
            start if part == 0 else common,
            common if part == 0 else stop,
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
    at = ((split.to(tl.int64) * tl.num_programs(2) + request) * n_rows + row) * n_heads + head
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
