"""Rows: the token positions a forward pass computes, against a buffer that holds everybody else's keys and values.

Full prefill is all rows, naive reuse is the question's rows, one decode step is one row. This is the one idea the
engine rests on; see docs/architecture.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fuse.rectangles import Rectangle, rectangles

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


@dataclass(slots=True, eq=False)
class RowsPlan:
    """One forward pass: which rows it computes and which keys they may see.

    A row at position p sees the keys at positions <= p, and in a layer with a sliding window of W only those > p - W.

    Attributes:
        rows: `[R]` int64, ascending positions.
        length: keys at positions >= length do not exist yet.
        visible: per layer, `[V]` int64 ascending positions that may be seen at all, or None for every position; on the
            CPU where they are known there.
        observe: called in every layer before attention, with the layer's queries and keys; a probe's eye.
        windows: per layer the sliding window in tokens or None, for models that do not say it themselves.
        on_host: the rows on the CPU, where they are known there: what looks at them would have to wait for a device.
    """

    rows: Tensor
    length: int
    visible: Sequence[Tensor | None] | None = None
    observe: Observer | None = None
    windows: Sequence[int | None] | None = None
    on_host: Tensor | None = None
    _blocks: dict[tuple[int, int | None], list[RowBlock]] = field(default_factory=dict)
    _rectangles: dict[int, list[Rectangle]] = field(default_factory=dict)
    _visible: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: Tensor,
        windows: Sequence[int | None] | None = None,
        *,
        device: torch.device | None = None,
        visible: Sequence[Tensor | None] | None = None,
    ) -> RowsPlan:
        """Plan a pass over `rows`, ascending and not empty.

        Args:
            rows: `[R]` int64; the host waits for them unless they are on the CPU.
            windows: see the attributes.
            device: where the pass computes; None is where the rows are.
            visible: see the attributes.
        """
        there = rows if device is None else rows.to(device, non_blocking=device.type == "cuda")
        host = rows if rows.device.type == "cpu" else None
        return cls(there, int(rows[-1]) + 1, visible, None, windows, host)

    @classmethod
    def between(
        cls,
        start: int,
        stop: int,
        device: torch.device,
        windows: Sequence[int | None] | None = None,
        observe: Observer | None = None,
    ) -> RowsPlan:
        """Plan a pass over all rows `start <= p < stop`."""
        rows = torch.arange(start, stop, device=device)
        return cls(rows, stop, None, observe, windows, torch.arange(start, stop))

    @property
    def at(self) -> slice | Tensor:
        """The rows as an index: a slice, which copies faster, where the host knows that they have no gaps."""
        first, host = self.length - len(self.rows), self.rows if self.rows.device.type == "cpu" else self.on_host
        return slice(first, self.length) if host is not None and int(host[0]) == first else self.rows

    def visible_at(self, layer: int) -> Tensor | None:
        """Return the positions layer `layer` may see, or None for all; on the device of the rows."""
        given = None if self.visible is None else self.visible[layer]
        if given is None or given.device == self.rows.device:
            return given
        if id(given) not in self._visible:
            self._visible[id(given)] = given.to(self.rows.device, non_blocking=True)
        return self._visible[id(given)]

    def blocks(self, layer: int, window: int | None) -> list[RowBlock]:
        """Split the rows for attention. Computed once per set of visible keys and window, then shared by layers."""
        visible = None if self.visible is None else self.visible[layer]
        key = (0 if visible is None else id(visible), window)
        if key not in self._blocks:
            there, host = self.visible_at(layer), None if visible is None else visible.cpu()
            self._blocks[key] = split_rows(self.rows, self.length, there, window, self.on_host, host)
        return self._blocks[key]

    def rectangles(self, layer: int) -> list[Rectangle]:
        """Cut what the rows see for `attend_in_rectangles`, in a layer without a window; shared like blocks."""
        visible = None if self.visible is None else self.visible[layer]
        key = 0 if visible is None else id(visible)
        if key not in self._rectangles:
            listed = (self.rows if self.on_host is None else self.on_host).tolist()
            keys = None if visible is None else visible.tolist()
            ends = [row + 1 if keys is None else bisect_right(keys, row) for row in listed]
            self._rectangles[key] = rectangles(ends)
        return self._rectangles[key]


Observer = Callable[[int, Tensor, Tensor, float, "float | None", "int | None"], None]
"""`(layer, queries [1, Hq, R, D], keys [1, Hkv, length, D], scaling, softcap, window) -> None`."""


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
