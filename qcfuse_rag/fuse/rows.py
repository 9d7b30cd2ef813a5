"""Rows: the token positions a forward pass computes, against a buffer that holds everybody else's keys and values.

Full prefill is all rows, naive reuse is the question's rows, one decode step is one row. This is the one idea the
engine rests on; see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
        visible: per layer, `[V]` int64 ascending positions that may be seen at all, or None for every position.
        observe: called in every layer before attention, with the layer's queries and keys; a probe's eye.
        windows: per layer the sliding window in tokens or None, for models that do not say it themselves.
        gapless: whether the rows are known to be the last ones of the length, all of them; of rows on a CPU that is
            seen.
    """

    rows: Tensor
    length: int
    visible: Sequence[Tensor | None] | None = None
    observe: Observer | None = None
    windows: Sequence[int | None] | None = None
    gapless: bool = False
    _blocks: dict[tuple[int, int | None], list[RowBlock]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Tensor, windows: Sequence[int | None] | None = None) -> RowsPlan:
        """Plan a pass over `rows`, ascending and not empty, that see every key up to their own position."""
        return cls(rows, length=int(rows[-1]) + 1, windows=windows)

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
        return cls(torch.arange(start, stop, device=device), stop, observe=observe, windows=windows, gapless=True)

    @property
    def at(self) -> slice | Tensor:
        """The rows as an index: a slice, which copies faster, where the host knows that they have no gaps."""
        first = self.length - len(self.rows)
        gapless = self.gapless or (self.rows.device.type == "cpu" and int(self.rows[0]) == first)
        return slice(first, self.length) if gapless else self.rows

    def visible_at(self, layer: int) -> Tensor | None:
        """Return the positions layer `layer` may see, or None for all."""
        return None if self.visible is None else self.visible[layer]

    def blocks(self, layer: int, window: int | None) -> list[RowBlock]:
        """Split the rows for attention. Computed once per set of visible keys and window, then shared by layers."""
        visible = self.visible_at(layer)
        key = (0 if visible is None else id(visible), window)
        if key not in self._blocks:
            self._blocks[key] = split_rows(self.rows, self.length, visible, window)
        return self._blocks[key]


Observer = Callable[[int, Tensor, Tensor, float, "float | None", "int | None"], None]
"""`(layer, queries [1, Hq, R, D], keys [1, Hkv, length, D], scaling, softcap, window) -> None`."""


def split_rows(rows: Tensor, length: int, visible: Tensor | None, window: int | None) -> list[RowBlock]:
    """Cut rows into blocks so that no block reads keys beyond its last row's position.

    Args:
        rows: `[R]` int64 ascending positions.
        length: number of keys.
        visible: `[V]` int64 ascending positions of the keys if only some may be seen; key ranges then index into it.
        window: sliding window in tokens, or None.
    """
    if window is not None and window >= length:
        window = None
    if visible is None and window is None and len(rows) == length:
        return [RowBlock(0, length, 0, length, mask=None, causal=True)]
    positions = torch.arange(length, device=rows.device) if visible is None else visible
    listed = rows.tolist()
    blocks = []
    for start in range(0, len(listed), ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, len(listed))
        first_row, last_row = listed[start], listed[stop - 1]
        last_key = int(torch.searchsorted(positions, last_row, right=True))
        first_key = 0 if window is None else int(torch.searchsorted(positions, first_row - window, right=True))
        mask = _mask(rows[start:stop], positions[first_key:last_key], window)
        blocks.append(RowBlock(start, stop, first_key, last_key, mask, causal=False))
    return blocks


def _mask(rows: Tensor, keys: Tensor, window: int | None) -> Tensor | None:
    distance = rows[:, None] - keys[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return None if bool(mask.all()) else mask
