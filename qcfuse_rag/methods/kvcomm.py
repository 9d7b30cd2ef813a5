"""KVCOMM (arXiv 2510.12872): add the average of what other contexts changed; compute chunks whose contexts disagree."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qcfuse_rag.fusion.method import BY_ATTENTION, FixedRatio, Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.fusion.state import AdaptedChunk, PlacementContext
from qcfuse_rag.methods.captures.slots import (
    Slot,
    add_differences,
    context_distance,
    follows_system_prefix,
    predecessors,
    read_checked,
    slots_at,
)
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED

NEGLIGIBLE = 1e-4
"""Weight below which an anchor is not read."""


@dataclass(frozen=True, slots=True)
class AnchorOffsets:
    """Add the weighted average of the stored differences; compute the chunk if no contexts are clearly nearer.

    A difference captured in the same context is added alone, which is exact.

    The chunk is computed in full if the entropy of the weights exceeds the share `gamma` of its maximum, `log2` of the
    number of anchors. A single anchor is always used, as published.
    """

    gamma: float = 0.3
    temperature: float = 1.0
    anchors: int = 20

    def __post_init__(self) -> None:
        if self.gamma < 0 or self.temperature <= 0 or self.anchors < 1:
            raise ValueError(
                f"gamma must be at least 0, temperature and anchors above 0, got {self.gamma}, {self.temperature} "
                f"and {self.anchors}"
            )

    def adapt(self, context: PlacementContext, stored: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Return the chunk with the differences added, the chunk itself if exact, or the reason to compute it."""
        if isinstance(stored, Miss):
            return stored
        if context.exact_under(context.base):
            return AdaptedChunk(stored, exact=True)
        if not follows_system_prefix(context):
            return Miss("no anchor applies, since text other than passages precedes the chunk")
        slots, now = slots_at(context, "difference", self.anchors), predecessors(context)
        same = [slot for slot in slots if slot.context == now]
        for slot in same:
            chunk = read_checked(context.store, slot)
            if chunk is not None:
                corrected = add_differences(stored, [(1.0, chunk)], first_layer=1)
                return AdaptedChunk(corrected, exact=True, note=slot.key.base)
        return self._average(context, stored, [slot for slot in slots if slot not in same])

    def _average(self, context: PlacementContext, stored: ChunkKV, slots: list[Slot]) -> AdaptedChunk | Miss:
        if not slots:
            return Miss("no anchor")
        weights = self._weights([context_distance(slot, predecessors(context)) for slot in slots])
        entropy, max_entropy = sum(w * math.log2(1 / w) for w in weights if w > 0), math.log2(len(slots))
        if entropy > self.gamma * max_entropy:
            return Miss(f"anchors disagree: entropy {entropy:.2f} of {max_entropy:.2f} bits")
        chosen = []
        for weight, slot in zip(weights, slots, strict=True):
            if weight < NEGLIGIBLE:
                continue
            chunk = read_checked(context.store, slot)
            if chunk is None:
                return Miss(f"{slot.key.base} cannot be read")
            chosen.append((weight, chunk))
        note = f"{len(chosen)} of {len(slots)} anchors, entropy {entropy:.2f} bits"
        return AdaptedChunk(add_differences(stored, chosen, first_layer=1), note=note)

    def _weights(self, distances: list[float]) -> list[float]:
        nearest = min(distances)
        factors = [math.exp((nearest - distance) / self.temperature) for distance in distances]
        return [factor / sum(factors) for factor in factors]


def kvcomm(ratio: float = 0.0, gamma: float = 0.3, temperature: float = 1.0, anchors: int = 20) -> Method:
    """Add stored differences to framed caches; `capture(writer, groups, keep=("difference",))` makes them.

    Capture with `variants=20` to store as many differences as `anchors` tries.

    Args:
        ratio: share of the passage tokens to recompute in addition, chosen by ProphetKV's probe. This is ours; the
            paper recomputes none.
        gamma: share of the weights' largest entropy above which a passage is computed in full.
        temperature: temperature of the softmax over anchors.
        anchors: largest number of differences to try for each passage.
    """
    return Method(
        "kvcomm",
        FRAMED,
        choice=BY_ATTENTION,
        adapter=AnchorOffsets(gamma, temperature, anchors),
        probe=QuestionProbe(layers="all", anchor_ratio=1.0),
        selector=TopTokens(),
        budget=FixedRatio(ratio),
    )
