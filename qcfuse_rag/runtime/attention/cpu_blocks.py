"""Attention of rows on a CPU in rectangles: some rows, and a range of keys that all of them see.

Rows at ascending positions see a staircase of keys. Cut in halves again and again, most of it is rectangles, where
there are more than `LEAF_ROWS` rows: they need no mask, waste nothing on keys a row does not see, and let all heads
that share a key have one product with it. What is left is the stairs themselves. A row's rectangles are joined by the
logarithms of their sums, as split keys are (FlashAttention-2, arXiv 2307.08691, section 2.3; FlashDecoding).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.runtime.rows import RowsPlan

LEAF_ROWS = 64
"""Rows whose stairs are not cut further: products of fewer reach less of a processor's rate."""

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
"""Torch's fused attention, which alone hands out the logarithms of the sums."""

Seen = Literal["all", "stairs", "causal"]


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Neighbouring rows and neighbouring keys.

    Attributes:
        start, stop: the rows' range within the plan.
        first_key, last_key: the keys' range.
        seen: every row sees `all` keys; or those up to its own, by the `mask` or `causal`, the i-th row i + 1 of them.
        mask: `[stop - start, last_key - first_key]`, 0 where a row sees a key, else minus infinity.
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    seen: Seen
    mask: Tensor | None = None


def attention_blocks(ends: Sequence[int], leaf_rows: int = LEAF_ROWS) -> list[AttentionBlock]:
    """Cut what rows see; the rectangles of one row follow one another in the order of its keys.

    Args:
        ends: of each row, how many keys it sees, one at least; ascending.
        leaf_rows: rows whose stairs are not cut further.

    Raises:
        ValueError: if the first row sees none.
    """
    found: list[AttentionBlock] = []

    def cut(start: int, stop: int, first: int) -> None:
        """Cut what rows see from key `first` on, which all of them see."""
        own = ends[start:stop]
        if all(end == first + row + 1 for row, end in enumerate(own)):
            found.append(AttentionBlock(start, stop, first, own[-1], "causal" if len(own) > 1 else "all"))
        elif own[0] == own[-1]:
            found.append(AttentionBlock(start, stop, first, own[-1], "all"))
        elif len(own) <= leaf_rows:
            found.append(AttentionBlock(start, stop, first, own[-1], "stairs", _stairs(own, first)))
        else:
            middle = (start + stop) // 2
            cut(start, middle, first)
            cut_shared(middle, stop, first)

    def cut_shared(start: int, stop: int, first: int) -> None:
        """Cut off what all rows see but one key, so that no row is left without; then cut what is left."""
        shared = ends[start] - 1
        if first < shared < ends[stop - 1] - 1:
            found.append(AttentionBlock(start, stop, first, shared, "all"))
            first = shared
        cut(start, stop, first)

    if ends[0] < 1:
        raise ValueError("the first row sees no key at all, not even its own")
    cut_shared(0, len(ends), 0)
    return found


def attention_blocks_of(plan: RowsPlan, layer: int) -> list[AttentionBlock]:
    """Cut what the rows of a plan see in a layer without a window; computed once per set of visible keys."""
    key = ("rectangles", plan.visible_key(layer))
    if key not in plan.derived:
        visible = None if plan.visible is None else plan.visible[layer]
        rows = (plan.rows if plan.on_host is None else plan.on_host).tolist()
        keys = None if visible is None else visible.tolist()
        plan.derived[key] = attention_blocks([row + 1 if keys is None else bisect_right(keys, row) for row in rows])
    cut: list[AttentionBlock] = plan.derived[key]
    return cut


def supports_cpu_blocks(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `attend_in_blocks` computes attention of these; others are not faster by it, or not exact.

    Its logarithms have no gradient, and torch's own function for them, which is not a public one, reads channels side
    by side whether they are or not.
    """
    return (
        query.device.type == "cpu"
        and hasattr(torch.ops.aten, FLASH)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)))
        and query.dtype == key.dtype == value.dtype == torch.float32
        and query.shape[-1] == value.shape[-1]
        and all(each.stride(-1) == 1 for each in (query, key, value))
    )


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, cut: Sequence[AttentionBlock], scaling: float
) -> Tensor:
    """Attend with rows to the keys they see.

    Args:
        query: `[B, Hq, R, D]` float32, on a CPU, channels side by side; keys and values likewise.
        key: `[B, Hkv, T, D]`.
        value: `[B, Hkv, T, D]`.
        cut: what the rows see, from `attention_blocks`.
        scaling: factor on scores.

    Returns:
        `[B, R, Hq, D]`.
    """
    batch, heads, n_rows, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.view(batch, kv_heads, heads // kv_heads, n_rows, dim)
    # The order in which a model's layers want it: heads of a row side by side.
    out = query.new_empty(batch, n_rows, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    logs = query.new_empty(out.shape[:-1])
    for part in cut:
        rows, keys = slice(part.start, part.stop), slice(part.first_key, part.last_key)
        attended, part_logs = _attend(grouped[:, :, :, rows], key[:, :, keys], value[:, :, keys], part, scaling)
        joined, joined_logs = out[:, :, :, rows], logs[:, :, :, rows]
        if part.first_key == 0:  # the first that these rows have
            joined.copy_(attended)
            joined_logs.copy_(part_logs)
        else:
            joined.lerp_(attended, torch.sigmoid(part_logs - joined_logs)[..., None])
            torch.logaddexp(joined_logs, part_logs, out=joined_logs)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend(query: Tensor, key: Tensor, value: Tensor, part: AttentionBlock, scaling: float) -> tuple[Tensor, Tensor]:
    """Return `[B, Hkv, G, R, D]` of one rectangle, and the logarithms of the sums `[B, Hkv, G, R]`."""
    flash = getattr(torch.ops.aten, FLASH)
    batch, kv_heads, groups, n_rows, dim = query.shape
    if part.seen == "all":  # the heads of a group become rows, and share a reading
        out, logs = flash(query.reshape(batch, kv_heads, -1, dim), key, value, 0.0, False, scale=scaling)
    else:  # key heads take the place of sequences, and keys are the same for a group without being repeated
        shared = [each.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for each in (key, value)]
        causal = part.seen == "causal"
        out, logs = flash(query.flatten(0, 1), *shared, 0.0, causal, attn_mask=part.mask, scale=scaling)
    return out.reshape(query.shape), logs.reshape(batch, kv_heads, groups, n_rows)


def _stairs(ends: Sequence[int], first: int) -> Tensor:
    seen = torch.tensor(ends)[:, None] > torch.arange(first, ends[-1])
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
