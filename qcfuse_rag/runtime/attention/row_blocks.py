"""Blocks of neighbouring rows that share one masked attention call."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.runtime.rows import RowsPlan

ROWS_PER_BLOCK = 128

KEPT_MASK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Neighbouring rows that share one attention call, and the keys that call needs.

    Attributes:
        start, stop: the rows' range within the plan.
        first_key, last_key: range of key positions (or of indices into the visible keys) any of the rows may see.
        mask: `[stop - start, last_key - first_key]` bool, True where a row sees a key; None if every row sees every
            key of the range, or if `causal` says it all.
        causal: the rows are the last of the range and each sees the keys up to itself.
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: Tensor | None
    causal: bool
    _additive: dict[torch.dtype, Tensor] = field(default_factory=dict, compare=False)

    def additive(self, dtype: torch.dtype) -> Tensor:
        """Return the mask, of a block that has one, as fused kernels want it: 0 or minus infinity.

        Torch would make this of a boolean one in every layer anew. Kept for the next layer unless it is large.
        """
        assert self.mask is not None
        if dtype in self._additive:
            return self._additive[dtype]
        made = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
        made.masked_fill_(~self.mask, float("-inf"))
        if made.nbytes <= KEPT_MASK_BYTES:
            self._additive[dtype] = made
        return made


def split_rows(
    rows: Tensor,
    length: int,
    visible: Tensor | None,
    window: int | None,
    rows_on_host: Tensor | None = None,
    visible_on_host: Tensor | None = None,
) -> list[RowBlock]:
    """Cut rows into blocks so that no block reads keys beyond its last row's position.

    Args:
        rows: `[R]` int64 ascending positions.
        length: number of keys.
        visible: `[V]` int64 ascending positions of the keys if only some may be seen; key ranges then index into it.
        window: sliding window in tokens, or None.
        rows_on_host: the rows on the CPU; the host waits for them if None.
        visible_on_host: likewise.
    """
    if window is not None and window >= length:
        window = None
    if visible is None and window is None and len(rows) == length:
        return [RowBlock(0, length, 0, length, mask=None, causal=True)]
    listed = (rows if rows_on_host is None else rows_on_host).tolist()
    keys = range(length) if visible is None else (visible if visible_on_host is None else visible_on_host).tolist()
    positions = torch.arange(length, device=rows.device) if visible is None else visible
    blocks = []
    for start in range(0, len(listed), ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, len(listed))
        first_row, last_row = listed[start], listed[stop - 1]
        last_key = bisect_right(keys, last_row)
        first_key = 0 if window is None else bisect_right(keys, first_row - window)
        all_before = keys[last_key - 1] <= first_row
        all_near = window is None or last_row - keys[first_key] < window
        mask = None
        if not all_before or not all_near:
            mask = _mask(rows[start:stop], positions[first_key:last_key], window)
        blocks.append(RowBlock(start, stop, first_key, last_key, mask, causal=False))
    return blocks


def _mask(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    distance = rows[:, None] - keys[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask


def blocks_of(plan: RowsPlan, layer: int, window: int | None) -> list[RowBlock]:
    """Split the rows of a plan for attention; computed once per set of visible keys and window, then shared by layers.

    Args:
        plan: the pass.
        layer: index of the layer.
        window: the layer's sliding window in tokens, or None.
    """
    key = ("blocks", plan.visible_key(layer), window)
    if key not in plan.derived:
        visible = None if plan.visible is None else plan.visible[layer]
        on_host = None if visible is None else visible.cpu()
        plan.derived[key] = split_rows(plan.rows, plan.length, plan.visible_at(layer), window, plan.on_host, on_host)
    blocks: list[RowBlock] = plan.derived[key]
    return blocks
