"""AgentKVShift (arXiv 2607.21604): recompute a few tokens of each chunk, shift the others by what those moved."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.deviation import DeviationProbe, stored_rows
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.selectors import Selection, TopPerChunk
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.models.rope import LayerRope, angles, rotate
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.store.prefill_base import BLIND, Base


@dataclass(frozen=True, slots=True)
class MeanShift:
    """Add each chunk's mean residual, layer by layer, to its tokens that are not rows.

    AgentKVShift (arXiv 2607.21604): a chunk's residual, fresh minus stored, is a part its tokens share and noise; the
    recomputed tokens tell the shared part. Keys are compared unrotated, since the same residual turns with the
    position. The weight of a token is its early deviation, at most 1, taken relative to the mean of the chunk's
    recomputed tokens.

    Attributes:
        keys, values: which of them to shift.
    """

    keys: bool = True
    values: bool = True

    def make_hook(
        self,
        fused: FusedPrompt,
        candidates: list[PlacedChunk],
        selection: Selection,
        scores: Scores | None,
        budget: int,
    ) -> MeanShiftPass:
        """Return the correction of one pass."""
        assert scores is not None
        distance = scores.mean.clamp_min(0).sqrt()
        chunks = []
        for placed in candidates:
            span = torch.arange(placed.span.start, placed.span.stop, device=distance.device)
            own = torch.isin(span, selection.positions)
            if own.any() and not own.all():
                usual = distance[span[own]].mean().clamp_min(torch.finfo(torch.float32).tiny)
                weights = (distance[span[~own]] / usual).clamp_max(1)
                chunks.append(ShiftedChunk(span[own], span[~own], weights))
        return MeanShiftPass(fused.lm.ropes, chunks, self.keys, self.values)


@dataclass(frozen=True, slots=True, eq=False)
class ShiftedChunk:
    """A chunk in parts: `told` recomputed positions, `others` to shift, their `weights` in [0, 1]."""

    told: Tensor
    others: Tensor
    weights: Tensor


@dataclass(slots=True, eq=False)
class MeanShiftPass:
    """One pass's correction. Residuals of layer 0 are rounding and are left alone."""

    ropes: tuple[LayerRope, ...]
    chunks: list[ShiftedChunk]
    keys: bool
    values: bool
    _stored: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Keep all rows; remember what is about to be overwritten."""
        self._stored = [stored_rows(buffer, layer, chunk.told) for chunk in self.chunks]
        return rows

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer, query: Tensor) -> None:
        """Shift the tokens that are no rows, before any row looks at them."""
        if layer == 0:
            return
        keys, values = buffer.keys[layer], buffer.values[layer]
        for chunk, (old_keys, old_values) in zip(self.chunks, self._stored, strict=True):
            weights = chunk.weights[:, None].to(keys.dtype)
            if self.keys:
                moved = self._turn(layer, keys[:, :, chunk.told] - old_keys, -chunk.told)
                mean = moved.mean(2, keepdim=True).expand(-1, -1, len(chunk.others), -1)
                keys[:, :, chunk.others] += weights * self._turn(layer, mean, chunk.others)
            if self.values:
                mean = (values[:, :, chunk.told] - old_values).mean(2, keepdim=True)
                values[:, :, chunk.others] += weights * mean

    def _turn(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        rope = self.ropes[layer]
        if rope.inv_freq is None:
            return keys
        table = angles(rope.inv_freq.to(keys.device), positions)
        return rotate(keys, *table, interleaved=rope.interleaved)


def agentkvshift(ratio: float = 0.1, base: Base = BLIND, keys: bool = True, values: bool = True) -> Method:
    """Recompute the tokens whose keys deviate most in layer 1, and add each chunk's mean residual to the others.

    Args:
        ratio: share of each chunk's tokens to recompute.
        base: which stored caches to start from.
        keys: shift keys.
        values: shift values.
    """
    return Method(
        "agentkvshift",
        base,
        probe=DeviationProbe(layer=1, measure="key"),
        selector=TopPerChunk(),
        budget=FixedRatio(ratio),
        layer_hook=MeanShift(keys, values),
    )
