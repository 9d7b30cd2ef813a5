"""The distance of stored keys and values from those computed in this prompt: the score of CacheBlend and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.layer_hooks import HookedPass
from qcfuse_rag.runtime.rows import RowsPlan

Measure = Literal["key", "value", "key and value"]


def deviation(
    fresh: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], measure: Measure = "key and value"
) -> Tensor:
    """Return the squared distance of keys, values or both, summed over heads and channels.

    Args:
        fresh: keys and values `[1, Hkv, R, D]`, computed in the prompt.
        stored: the same rows' as they were stored, keys rotated to the same positions.
        measure: keys, values or both.

    Returns:
        `[R]` float32.
    """
    kinds = zip(("key", "value"), fresh, stored, strict=True)
    pairs = [(new, old) for kind, new, old in kinds if kind in measure]
    parts = [(new.float() - old.float()).square().sum((0, 1, 3)) for new, old in pairs]
    return torch.stack(parts).sum(0)


@dataclass(slots=True, eq=False)
class DeviationWatch:
    """A layer hook that keeps one layer's stored keys and values and measures their distance from the fresh ones.

    Attributes:
        layer: the layer.
        measure: keys, values or both.
        distance: `[R]` float32, set by the pass.
    """

    layer: int
    measure: Measure
    distance: Tensor | None = None
    _stored: tuple[Tensor, Tensor] | None = None

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Keep all rows."""
        if layer == self.layer:
            self._stored = stored_rows(buffer, layer, rows)
        return rows

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer, query: Tensor) -> None:
        """Measure the distance."""
        if layer == self.layer and self._stored is not None:
            self.distance = deviation(stored_rows(buffer, layer, rows), self._stored, self.measure)


@dataclass(frozen=True, slots=True)
class DeviationProbe:
    """Compute every reused token through the first layers and score it by the change of its keys and values.

    Keys and values of layer 0 depend on the token alone and never deviate, so layer 1 is the first useful layer.

    Attributes:
        layer: the layer to compare.
        measure: squared distance of keys, of values, or both.
    """

    layer: int = 1
    measure: Measure = "key and value"

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise ValueError(f"layer must not be negative, got {self.layer}")

    def scores(self, fused: FusedPrompt) -> Scores:
        """Score every position; the stored rows are restored afterwards.

        A model with fewer layers is compared at its last layer.
        """
        lm = fused.lm
        layer = min(self.layer, lm.n_layers - 1)
        stop = max(placed.span.stop for placed in fused.placed_chunks)
        is_row = ~fused.known
        for placed in fused.placed_chunks:
            if not placed.exact:
                is_row[placed.span.start : placed.span.stop] = True
        is_row[stop:] = False
        plan = RowsPlan.of(is_row.nonzero()[:, 0], lm.sliding, device=lm.device)
        rows = plan.rows
        buffer = fused.await_all()
        kept = [stored_rows(buffer, index, rows) for index in range(layer + 1)]
        watch = DeviationWatch(layer, self.measure)
        hooked_pass = HookedPass(plan, watch, buffer)
        fused.runner.prefills.hidden(fused.ids[rows], plan, buffer, depth=layer + 1, hooked_pass=hooked_pass)
        fused.row_layers += hooked_pass.row_layers
        for index, (keys, values) in enumerate(kept):
            buffer.keys[index][:, :, rows] = keys
            buffer.values[index][:, :, rows] = values
        assert watch.distance is not None
        by_layer = torch.zeros(1, len(fused.prompt), dtype=torch.float32, device=lm.device)
        by_layer[0, rows] = watch.distance
        return Scores(by_layer, (layer,))


def stored_rows(buffer: KVBuffer, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of a layer's keys and values at some positions, each `[1, Hkv, R, D]`."""
    return buffer.keys[layer][:, :, rows], buffer.values[layer][:, :, rows]
