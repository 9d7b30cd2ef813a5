"""Attention of rows on a CPU in rectangles: some rows, and a range of keys that all of them see.

Rows at ascending positions see a staircase of keys. Cut in halves again and again, most of it is rectangles, where
there are more than `LEAF_ROWS` rows: they need no mask, waste nothing on keys a row does not see, and let all heads
that share a key have one product with it. What is left is the stairs themselves. A row's rectangles are joined by the
logarithms of their sums, as split keys are (FlashAttention-2, arXiv 2307.08691, section 2.3; FlashDecoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

LEAF_ROWS = 64
"""Rows whose stairs are not cut further: products of fewer reach less of a processor's rate."""

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
"""Torch's fused attention, which alone hands out the logarithms of the sums."""

Seen = Literal["all", "stairs", "causal"]


@dataclass(frozen=True, slots=True)
class Rectangle:
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


def rectangles(ends: Sequence[int]) -> list[Rectangle]:
    """Cut what rows see; those of one row follow one another in the order of its keys.

    Args:
        ends: of each row, how many keys it sees, one at least; ascending.

    Raises:
        ValueError: if the first row sees none.
    """
    found: list[Rectangle] = []

    def cut(start: int, stop: int, first: int) -> None:
        """Cut what rows see from key `first` on, which all of them see."""
        last = ends[stop - 1]
        if all(end == first + row + 1 for row, end in enumerate(ends[start:stop])):
            found.append(Rectangle(start, stop, first, last, "causal" if stop - start > 1 else "all"))
        elif ends[start] == last:
            found.append(Rectangle(start, stop, first, last, "all"))
        elif stop - start <= LEAF_ROWS:
            found.append(Rectangle(start, stop, first, last, "stairs"))
        else:
            middle = (start + stop) // 2
            cut(start, middle, first)
            share(middle, stop, first)

    def share(start: int, stop: int, first: int) -> None:
        """Cut off what all rows see but one key, so that no row is left without."""
        common = ends[start] - 1
        if first < common < ends[stop - 1] - 1:
            found.append(Rectangle(start, stop, first, common, "all"))
            first = common
        cut(start, stop, first)

    if ends[0] < 1:
        raise ValueError("the first row sees no key at all, not even its own")
    share(0, len(ends), 0)
    return found


def with_masks(cut: Sequence[Rectangle], ends: Sequence[int]) -> list[Rectangle]:
    """Give stairs their masks."""
    return [one if one.seen != "stairs" else replace(one, mask=_stairs(one, ends)) for one in cut]


def rectangles_take(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `attend_in_rectangles` computes attention of these; others are not faster by it, or not exact.

    Its logarithms have no gradient, and torch's own function for them, which is not a public one, reads channels side
    by side whether they are or not.
    """
    return (
        query.device.type == "cpu"
        and hasattr(torch.ops.aten, FLASH)
        and not (torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value)))
        and query.dtype == key.dtype == value.dtype == torch.float32
        and query.shape[-1] == value.shape[-1]
        and all(one.stride(-1) == 1 for one in (query, key, value))
    )


def attend_in_rectangles(query: Tensor, key: Tensor, value: Tensor, cut: Sequence[Rectangle], scaling: float) -> Tensor:
    """Attend with rows to the keys they see.

    Args:
        query: `[B, Hq, R, D]` float32, on a CPU, channels side by side; keys and values likewise.
        key: `[B, Hkv, T, D]`.
        value: `[B, Hkv, T, D]`.
        cut: what the rows see, from `with_masks`.
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
    for one in cut:
        given, keys, values = (
            grouped[:, :, :, one.start : one.stop],
            *(side[:, :, one.first_key : one.last_key] for side in (key, value)),
        )
        fresh, sums = _one(given, keys, values, one, scaling)
        rows = slice(one.start, one.stop)
        joined, before = out[:, :, :, rows], logs[:, :, :, rows]
        if one.first_key == 0:  # the first that these rows have
            joined.copy_(fresh)
            before.copy_(sums)
        else:
            joined.lerp_(fresh, torch.sigmoid(sums - before)[..., None])
            torch.logaddexp(before, sums, out=before)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _one(query: Tensor, key: Tensor, value: Tensor, one: Rectangle, scaling: float) -> tuple[Tensor, Tensor]:
    """Return `[B, Hkv, G, R, D]` of one rectangle, and the logarithms of the sums `[B, Hkv, G, R]`."""
    flash = getattr(torch.ops.aten, FLASH)
    batch, kv_heads, groups, n_rows, dim = query.shape
    if one.seen == "all":  # the heads of a group become rows, and share a reading
        out, sums = flash(query.reshape(batch, kv_heads, -1, dim), key, value, 0.0, False, scale=scaling)
    else:  # key heads take the place of sequences, and keys are the same for a group without being repeated
        shared = [each.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for each in (key, value)]
        causal = one.seen == "causal"
        out, sums = flash(query.flatten(0, 1), *shared, 0.0, causal, attn_mask=one.mask, scale=scaling)
    return out.reshape(query.shape), sums.reshape(batch, kv_heads, groups, n_rows)


def _stairs(one: Rectangle, ends: Sequence[int]) -> Tensor:
    seen = torch.tensor(ends[one.start : one.stop])[:, None] > torch.arange(one.first_key, one.last_key)
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
