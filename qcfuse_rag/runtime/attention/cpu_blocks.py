"""Attention of sparse rows on a CPU, in rectangular blocks of rows and keys.

Rows at ascending positions see a staircase of keys. More than `LEAF_ROWS` rows are halved repeatedly, and most of the
staircase becomes rectangles in which every row sees every key. These need no mask, compute no score that is masked out,
and all heads that share a key share one product with it. What is left are small staircases with masks. The blocks of a
row are merged by the logarithms of their softmax sums, like split keys (FlashAttention-2, arXiv 2307.08691, section
2.3; FlashDecoding).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.runtime.rows import ReaderBias, RowsPlan

LEAF_ROWS = 64
"""Rows whose staircase is not split further; products of fewer rows reach less of a processor's throughput."""

WIDE_GAP = 4
"""Keys between two neighbouring rows, as a multiple of the leaf rows, above which the rows are split there; most of
their staircase would be masked."""

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
"""Torch's fused attention; the only one that returns the logarithms of the softmax sums."""

Seen = Literal["all", "staircase", "causal"]


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Neighbouring rows and neighbouring keys.

    Attributes:
        start, stop: the rows' range within the plan.
        first_key, last_key: the keys' range.
        seen: `all`: every row sees every key; `staircase`: a row sees the keys of the `mask`; `causal`: row i sees the
            first i + 1 keys.
        mask: `[stop - start, last_key - first_key]`, 0 where a row sees a key, else minus infinity.
        biased: whether each head's bias is added to the scores of the block.
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    seen: Seen
    mask: Tensor | None = None
    biased: bool = False


def attention_blocks(ends: Sequence[int], leaf_rows: int = LEAF_ROWS) -> list[AttentionBlock]:
    """Split the keys that rows see into blocks; the blocks of a row follow one another in the order of its keys.

    Args:
        ends: for each row the number of keys it sees, at least one; ascending.
        leaf_rows: number of rows whose staircase is not split further.

    Raises:
        ValueError: if the first row sees no key.
    """
    blocks: list[AttentionBlock] = []

    def split(start: int, stop: int, first: int) -> None:
        """Split the keys from `first` on, all of which the rows see up to their ends."""
        row_ends = ends[start:stop]
        if all(end == first + row + 1 for row, end in enumerate(row_ends)):
            blocks.append(AttentionBlock(start, stop, first, row_ends[-1], "causal" if len(row_ends) > 1 else "all"))
        elif row_ends[0] == row_ends[-1]:
            blocks.append(AttentionBlock(start, stop, first, row_ends[-1], "all"))
        elif gap := _first_gap(row_ends, WIDE_GAP * leaf_rows):
            split(start, start + gap, first)
            split_shared(start + gap, stop, first)
        elif len(row_ends) <= leaf_rows:
            mask = _staircase_mask(row_ends, first)
            blocks.append(AttentionBlock(start, stop, first, row_ends[-1], "staircase", mask))
        else:
            middle = (start + stop) // 2
            split(start, middle, first)
            split_shared(middle, stop, first)

    def split_shared(start: int, stop: int, first: int) -> None:
        """Cut off the keys that all rows see, except the last of them; then split the rest.

        That key is left so that the rest has a key for every row.
        """
        shared = ends[start] - 1
        if first < shared < ends[stop - 1] - 1:
            blocks.append(AttentionBlock(start, stop, first, shared, "all"))
            first = shared
        split(start, stop, first)

    if ends[0] < 1:
        raise ValueError("the first row sees no key at all, not even its own")
    split_shared(0, len(ends), 0)
    return blocks


def _first_gap(row_ends: Sequence[int], keys: int) -> int:
    """Return the index of the first row that sees over so many keys more than the row before it; 0 if none does."""
    return next((row for row, (before, end) in enumerate(pairwise(row_ends), 1) if end - before > keys), 0)


def attention_blocks_of(plan: RowsPlan, layer: int) -> list[AttentionBlock]:
    """Return the blocks of a plan in a layer without a window; computed once per set of visible keys."""
    bias = plan.reader_bias
    key = ("attention blocks", plan.visible_key(layer), bias and (bias.start, bias.first, bias.last))
    if key not in plan.derived:
        visible = None if plan.visible is None else plan.visible[layer]
        rows = (plan.rows if plan.on_host is None else plan.on_host).tolist()
        keys = None if visible is None else visible.tolist()
        ends = [row + 1 if keys is None else bisect_right(keys, row) for row in rows]
        plan.derived[key] = attention_blocks(ends) if bias is None else biased_blocks(ends, bias)
    blocks: list[AttentionBlock] = plan.derived[key]
    return blocks


def biased_blocks(ends: Sequence[int], bias: ReaderBias) -> list[AttentionBlock]:
    """Split the keys that rows see as `attention_blocks` does, with a block of its own for the keys that have a bias.

    Args:
        ends: for each row the number of keys it sees; ascending.
        bias: of the rows that see more than `bias.start` keys.
    """
    readers = bisect_right(ends, bias.start)  # the first row that reads with a bias
    blocks = attention_blocks(ends[:readers]) if readers else []
    for first, last, biased in ((0, bias.first, False), (bias.first, bias.last, True)):
        if first < last:
            blocks.append(AttentionBlock(readers, len(ends), first, last, "all", biased=biased))
    for block in attention_blocks([end - bias.last for end in ends[readers:]]):
        first_key, last_key = block.first_key + bias.last, block.last_key + bias.last
        start, stop = block.start + readers, block.stop + readers
        blocks.append(replace(block, start=start, stop=stop, first_key=first_key, last_key=last_key))
    return blocks


def supports_cpu_blocks(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `attend_in_blocks` computes attention of these tensors exactly and faster than torch.

    The logarithms that torch returns have no gradient. The private function that returns them assumes contiguous
    channels without checking.
    """
    tensors = (query, key, value)
    return (
        query.device.type == "cpu"
        and hasattr(torch.ops.aten, FLASH)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and query.dtype == key.dtype == value.dtype == torch.float32
        and query.shape[-1] == value.shape[-1]
        and all(tensor.stride(-1) == 1 for tensor in tensors)
    )


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[AttentionBlock],
    scaling: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend with rows to the keys they see.

    Args:
        query: `[B, Hq, R, D]` float32, on a CPU, with contiguous channels; keys and values likewise.
        key: `[B, Hkv, T, D]`.
        value: `[B, Hkv, T, D]`.
        blocks: the rows' blocks, from `attention_blocks`.
        scaling: factor on scores.
        bias: `[Hq]` float32, added to the scores of biased blocks; None adds nothing.

    Returns:
        `[B, R, Hq, D]`.
    """
    batch, heads, n_rows, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.view(batch, kv_heads, heads // kv_heads, n_rows, dim)
    # The memory layout that a model's layers expect: the heads of a row side by side.
    out = query.new_empty(batch, n_rows, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    logs = query.new_empty(out.shape[:-1])
    for block in blocks:
        rows, keys = slice(block.start, block.stop), slice(block.first_key, block.last_key)
        block_out, block_logs = _attend(grouped[:, :, :, rows], key[:, :, keys], value[:, :, keys], block, scaling)
        if block.biased and bias is not None:  # a constant on all scores moves the logarithm of their sum alone
            block_logs = block_logs + bias.view(kv_heads, -1, 1)
        rows_out, rows_logs = out[:, :, :, rows], logs[:, :, :, rows]
        if block.first_key == 0:  # the first block of these rows
            rows_out.copy_(block_out)
            rows_logs.copy_(block_logs)
        else:
            rows_out.lerp_(block_out, torch.sigmoid(block_logs - rows_logs)[..., None])
            torch.logaddexp(rows_logs, block_logs, out=rows_logs)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend(query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the attention of one block `[B, Hkv, G, R, D]` and the logarithms of its softmax sums `[B, Hkv, G, R]`."""
    flash = getattr(torch.ops.aten, FLASH)
    batch, kv_heads, groups, n_rows, dim = query.shape
    if block.seen == "all":  # the heads of a group become rows and share one read of the keys
        out, logs = flash(query.reshape(batch, kv_heads, -1, dim), key, value, 0.0, False, scale=scaling)
    else:  # key heads become the batch, and keys are expanded over the heads of a group without a copy
        expanded = [side.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for side in (key, value)]
        causal = block.seen == "causal"
        out, logs = flash(query.flatten(0, 1), *expanded, 0.0, causal, attn_mask=block.mask, scale=scaling)
    return out.reshape(query.shape), logs.reshape(batch, kv_heads, groups, n_rows)


def _staircase_mask(ends: Sequence[int], first: int) -> Tensor:
    seen = torch.tensor(ends)[:, None] > torch.arange(first, ends[-1])
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
