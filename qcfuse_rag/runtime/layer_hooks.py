"""Hooks that act between the layers of a pass: they drop rows early, and correct keys and values of other positions.

Such a pass runs through a view of the model (see `decoder_view`). Before each layer, the rows that have ended are
dropped from the hidden states and from the layer's arguments.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Cache

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan

PER_ROW = ("position_ids", "position_embeddings", "cache_position", "per_layer_input")
"""Arguments of a decoder layer that hold one item for each row."""


class LayerHook:
    """Observes and changes one pass between its layers. Every pass gets a new hook; this one changes nothing.

    Layers without attention are asked for their rows alone.

    Attributes:
        chosen: `[S]` int64 ascending, the reused tokens that count as recomputed, whatever layer they ended in; None
            for the tokens computed in the last layer.
    """

    chosen: Tensor | None = None

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Choose the rows that a layer computes: some of `[R]` int64 ascending positions, including the last.

        A row that is left out is not computed in later layers either. Its stored keys and values, which the buffer
        still holds in this layer, stay.
        """
        return rows

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer) -> None:
        """Act after a layer's `[R]` rows are written to the buffer and before any row attends to them.

        The buffer's keys are rotated. Positions that are not rows may be changed.
        """

    def on_attention(self, layer: int, rows: Tensor, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        """Observe a layer's rotated queries `[1, Hq, R, D]` and keys `[1, Hkv, length, D]`, after `after_write`."""


class HookedPass:
    """The state of one pass with a hook; it runs the layers of the decoder (a `LayerRunner`).

    Attributes:
        plan: the rows that are left.
        row_layers: rows computed so far, summed over layers.
    """

    def __init__(self, plan: RowsPlan, hook: LayerHook, buffer: KVBuffer) -> None:
        self._initial_plan, self._hook, self._buffer = plan, hook, buffer
        self.plan = self._with_rows(plan.rows)
        self.row_layers = 0

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer on the rows that are left: `[..., R, H]` to `[..., R', H]`.

        The hook does not see layers that read another layer's keys, to which some models give the last rows alone.
        """
        own = layer < len(self._buffer.keys)
        if not own and hidden.shape[-2] < len(self.plan.rows):
            return inner(hidden, *args, **{**kwargs, "fusion": self.plan})
        left, initial_indices = self._narrow(layer) if own else (None, self._initial_indices(self.plan.rows))
        if left is not None:
            hidden = hidden.index_select(-2, left)
        n_rows = len(self._initial_plan.rows)
        args = tuple(_select(value, initial_indices) if _is_per_row(value, n_rows) else value for value in args)
        for name, value in kwargs.items():
            if name in PER_ROW or _is_per_row(value, n_rows):
                kwargs[name] = _select(value, initial_indices)
        if own:  # models differ in the name of the cache's argument
            cache = next(value for value in (*kwargs.values(), *args) if isinstance(value, Cache))
            written = partial(self._hook.after_write, layer, self.plan.rows, self._buffer)
            cache.layers[layer].at, cache.layers[layer].written = self.plan.at, written
        kwargs["fusion"] = self.plan
        return inner(hidden, *args, **kwargs)

    def _narrow(self, layer: int) -> tuple[Tensor | None, Tensor]:
        """Ask the hook for a layer's rows; return their indices in the present rows (None: all) and in the first."""
        rows = self._hook.before_layer(layer, self.plan.rows, self._buffer)
        left = None
        if len(rows) != len(self.plan.rows):
            left = torch.searchsorted(self.plan.rows, rows)
            self.plan = self._with_rows(rows)
        self.row_layers += len(rows)
        return left, self._initial_indices(rows)

    def _initial_indices(self, rows: Tensor) -> Tensor:
        return torch.searchsorted(self._initial_plan.rows, rows)

    @property
    def chosen(self) -> Tensor:
        """`[S]` int64 ascending, the rows that count as recomputed: the hook's choice, else the last layer's rows."""
        return self.plan.rows if self._hook.chosen is None else self._hook.chosen

    def _with_rows(self, rows: Tensor) -> RowsPlan:
        # The closure must not hold `self`, which holds the plan: the cycle would keep the buffer until it is collected.
        initial, hook = self._initial_plan, self._hook

        def observe(layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
            hook.on_attention(layer, rows, query, key, params)
            if initial.observe is not None:
                initial.observe(layer, query, key, params)

        host = initial.on_host if len(rows) == len(initial.rows) else None
        return RowsPlan(rows, initial.length, initial.visible, observe, initial.windows, host)


def _is_per_row(value: Any, n_rows: int) -> bool:
    """Return whether an argument holds an item for each row, judged by its shape; models name such inputs freely."""
    if isinstance(value, tuple):
        return len(value) > 0 and all(_is_per_row(part, n_rows) for part in value)
    return isinstance(value, Tensor) and value.dim() > 2 and value.shape[1] == n_rows


def _select(value: Any, rows: Tensor) -> Any:
    return tree_map_only(Tensor, lambda part: part.index_select(0 if part.dim() == 1 else 1, rows), value)
