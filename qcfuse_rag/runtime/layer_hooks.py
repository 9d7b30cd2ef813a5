"""Passes that change from layer to layer: rows that stop early, and corrections to what is not a row.

Before each layer, in a view of the model (see `decoder_view`), the rows that have ended are dropped, and what stands
for them in the layer's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import Cache

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.rows import RowsPlan

PER_ROW = ("position_ids", "position_embeddings", "cache_position", "per_layer_input")
"""Arguments of a decoder layer that hold one item for each row."""


class LayerHook(Protocol):
    """Watches one pass and changes it between layers. Made anew for every pass."""

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Choose the rows a layer computes, before it runs.

        Args:
            layer: the layer.
            rows: `[R]` int64 ascending positions computed so far.
            buffer: stored keys and values of this layer are still in place.

        Returns:
            Some of `rows`, ascending, the last of them included. A row that is left out is not computed in this layer
            or any later one; the stored keys and values stay in its place.
        """
        ...

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer, query: Tensor) -> None:
        """Act when a layer's fresh keys and values are in the buffer, before any row looks at them.

        Args:
            layer: the layer.
            rows: `[R]` positions computed in it.
            buffer: keys rotated; positions that are no rows may be changed.
            query: `[1, Hq, R, D]` of the rows, rotated.
        """
        ...


@runtime_checkable
class AttentionHook(LayerHook, Protocol):
    """A steering that looks at the pass's attention too, and says what it recomputed.

    Attributes:
        chosen: `[S]` int64 ascending, the reused tokens that count as recomputed, whatever layer they ended in; None
            for those computed in the last one.
    """

    chosen: Tensor | None

    def on_attention(
        self,
        layer: int,
        rows: Tensor,
        query: Tensor,
        key: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        window: int | None,
    ) -> None:
        """See what the rows are about to look at, after `after_write`.

        Args:
            layer: the layer.
            rows: `[R]` int64 ascending positions of the queries.
            query: `[1, Hq, R, D]`, rotated.
            key: `[1, Hkv, length, D]`, rotated.
            scaling: factor on scores.
            softcap: cap on scores, or None.
            window: sliding window in tokens, or None.
        """
        ...


@dataclass(slots=True, eq=False)
class NestedRows:
    """Rows that end at layers known beforehand (RelaxKV, arXiv 2609.33503: sets nested over depth).

    Attributes:
        positions: `[S]` int64 ascending, rows that end.
        until: `[S]` int64, the last layer each is computed in.
    """

    positions: Tensor
    until: Tensor

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Drop the rows whose last layer is behind."""
        ended = self.positions[self.until < layer]
        return rows[~torch.isin(rows, ended)] if len(ended) else rows

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer, query: Tensor) -> None:
        """Change nothing."""


class HookedPass:
    """The state of one steered pass: which rows are left, and how much was computed.

    Args:
        plan: rows at the start, and what they see.
        steering: decides between layers.
        buffer: of the request.
    """

    def __init__(self, plan: RowsPlan, hook: LayerHook, buffer: KVBuffer) -> None:
        self._first, self._hook, self._buffer = plan, hook, buffer
        self._start = plan.rows
        self.plan = self._with(plan.rows)
        self.row_layers = 0

    def _narrow(self, layer: int) -> tuple[Tensor | None, Tensor]:
        """Narrow the pass; return which of the present rows go on (None: all), and their indices among the first."""
        rows = self._hook.before_layer(layer, self.plan.rows, self._buffer)
        kept = None
        if len(rows) != len(self.plan.rows):
            kept = torch.searchsorted(self.plan.rows, rows)
            self.plan = self._with(rows)
        self.row_layers += len(rows)
        return kept, torch.searchsorted(self._start, rows)

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer on the rows that are left; `[..., R, H]` to `[..., R', H]`."""
        kept, among_first = self._narrow(layer)
        if kept is not None:
            hidden = hidden.index_select(-2, kept)
        count = len(self._start)
        args = tuple(_select(one, among_first) if _is_per_row(one, count) else one for one in args)
        for name, one in kwargs.items():
            if name in PER_ROW or _is_per_row(one, count):
                kwargs[name] = _select(one, among_first)
        cache = next(one for one in (*kwargs.values(), *args) if isinstance(one, Cache))  # under a name of the model's
        cache.layers[layer].at = self.plan.at
        kwargs["fusion"] = self.plan
        return inner(hidden, *args, **kwargs)

    @property
    def chosen(self) -> Tensor:
        """`[S]` int64 ascending, the rows that count as recomputed: the last layer's, unless the steering says."""
        chosen = self._hook.chosen if isinstance(self._hook, AttentionHook) else None
        return self.plan.rows if chosen is None else chosen

    def _with(self, rows: Tensor) -> RowsPlan:
        # Not `self`, which holds the plan: a ring of references would keep the buffer until it is collected.
        first, hook, buffer = self._first, self._hook, self._buffer

        def observe(
            layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None
        ) -> None:
            hook.after_write(layer, rows, buffer, query)
            if isinstance(hook, AttentionHook):
                hook.on_attention(layer, rows, query, key, scaling=scaling, softcap=softcap, window=window)
            if first.observe is not None:
                first.observe(layer, query, key, scaling, softcap, window)

        host = first.on_host if len(rows) == len(first.rows) else None
        return RowsPlan(rows, first.length, first.visible, observe, first.windows, host)


def _is_per_row(value: Any, n_rows: int) -> bool:
    """Return whether an argument of no known name has an item for each row, as inputs of layers of their own do."""
    if isinstance(value, tuple):
        return len(value) > 0 and all(_is_per_row(part, n_rows) for part in value)
    return isinstance(value, Tensor) and value.dim() > 2 and value.shape[1] == n_rows


def _select(value: Any, rows: Tensor) -> Any:
    if isinstance(value, tuple):
        return tuple(_select(part, rows) for part in value)
    if not isinstance(value, Tensor):
        return value
    return value.index_select(0 if value.dim() == 1 else 1, rows)
