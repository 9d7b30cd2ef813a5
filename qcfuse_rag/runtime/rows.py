"""Rows: the token positions a forward pass computes, against a buffer that holds everybody else's keys and values.

Full prefill is all rows, naive reuse is the question's rows, one decode step is one row. This is the one idea the
engine rests on; see docs/reference/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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
        derived: values that attention computes from the plan once and shares between layers, by a key of its own.
    """

    rows: Tensor
    length: int
    visible: Sequence[Tensor | None] | None = None
    observe: Observer | None = None
    windows: Sequence[int | None] | None = None
    on_host: Tensor | None = None
    derived: dict[Hashable, Any] = field(default_factory=dict)
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

    def visible_key(self, layer: int) -> int:
        """Return a key that is equal for layers that see the same set of keys."""
        visible = None if self.visible is None else self.visible[layer]
        return 0 if visible is None else id(visible)

    def visible_at(self, layer: int) -> Tensor | None:
        """Return the positions layer `layer` may see, or None for all; on the device of the rows."""
        given = None if self.visible is None else self.visible[layer]
        if given is None or given.device == self.rows.device:
            return given
        if id(given) not in self._visible:
            self._visible[id(given)] = given.to(self.rows.device, non_blocking=True)
        return self._visible[id(given)]


Observer = Callable[[int, Tensor, Tensor, float, "float | None", "int | None"], None]
"""`(layer, queries [1, Hq, R, D], keys [1, Hkv, length, D], scaling, softcap, window) -> None`."""
