"""AgentKVShift (arXiv 2607.21604): recompute a few tokens of each chunk, shift the others by their mean residual."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fusion.method import FixedRatio, Method, PassStart
from qcfuse_rag.methods.common import BY_CHANGE, DeviationProbe, TopPerChunk, stored_rows
from qcfuse_rag.models.rope import LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.layer_hooks import LayerHook
from qcfuse_rag.store.key import BLIND, Base


@dataclass(frozen=True, slots=True)
class MeanShift:
    """Add each chunk's mean residual, layer by layer, to its tokens that are not recomputed.

    AgentKVShift (arXiv 2607.21604): a token's residual, fresh minus stored, is a part that all tokens of the chunk
    share, plus noise; the mean over recomputed tokens estimates the shared part. Keys are compared unrotated, since
    rotation depends on the position. A token's weight is its early deviation relative to the mean of the chunk's
    recomputed tokens, at most 1.
    """

    keys: bool = True
    values: bool = True

    def make_hook(self, start: PassStart) -> MeanShiftPass:
        """Return the hook of one pass."""
        assert start.scores is not None
        distance = start.scores.mean.clamp_min(0).sqrt()
        chunks = []
        for placed in start.candidates:
            span = torch.arange(placed.span.start, placed.span.stop, device=distance.device)
            selected = torch.isin(span, start.selection.positions)
            if selected.any() and not selected.all():
                mean = distance[span[selected]].mean().clamp_min(torch.finfo(torch.float32).tiny)
                weights = (distance[span[~selected]] / mean).clamp_max(1)
                chunks.append(ShiftedChunk(span[selected], span[~selected], weights))
        return MeanShiftPass(start.fused.lm.ropes, chunks, self.keys, self.values)


@dataclass(frozen=True, slots=True, eq=False)
class ShiftedChunk:
    """A chunk's positions: `recomputed`, and `shifted` with their `weights` in [0, 1]."""

    recomputed: Tensor
    shifted: Tensor
    weights: Tensor


@dataclass(eq=False)
class MeanShiftPass(LayerHook):
    """The hook of one pass. Layer 0 is not shifted: its residuals are rounding errors."""

    ropes: tuple[LayerRope, ...]
    chunks: list[ShiftedChunk]
    keys: bool
    values: bool
    _stored: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Keep all rows; save the stored keys and values that are about to be overwritten."""
        self._stored = [stored_rows(buffer, layer, chunk.recomputed) for chunk in self.chunks]
        return rows

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer) -> None:
        """Shift the tokens that are not recomputed, before any row attends to them."""
        if layer == 0:
            return
        keys, values = buffer.keys[layer], buffer.values[layer]
        for chunk, (old_keys, old_values) in zip(self.chunks, self._stored, strict=True):
            weights = chunk.weights[:, None].to(keys.dtype)
            if self.keys:
                residual = self.ropes[layer].rotated(keys[:, :, chunk.recomputed] - old_keys, -chunk.recomputed)
                mean = residual.mean(2, keepdim=True).expand(-1, -1, len(chunk.shifted), -1)
                keys[:, :, chunk.shifted] += weights * self.ropes[layer].rotated(mean, chunk.shifted)
            if self.values:
                mean = (values[:, :, chunk.recomputed] - old_values).mean(2, keepdim=True)
                values[:, :, chunk.shifted] += weights * mean


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
        choice=BY_CHANGE,
        probe=DeviationProbe(layer=1, measure="key"),
        selector=TopPerChunk(),
        budget=FixedRatio(ratio),
        layer_hook=MeanShift(keys, values),
    )
