"""KVCOMM (arXiv 2510.12872): add the average of what other contexts changed, or compute where they disagree."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qcfuse_rag.fusion.adapters import AdaptedChunk, PlacementContext, add_differences, follows_system_prefix
from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.context_distance import context_distance
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.store.variant_slots import Slot, filled_slots, read_checked

NEGLIGIBLE = 1e-4
"""Weight below which an anchor is not read."""


@dataclass(frozen=True, slots=True)
class AnchorOffsets:
    """Add the average of the stored differences, or compute the chunk if it is not clear which of them are near.

    A difference born in this very context is added alone: that is exact, and no average can be.

    Attributes:
        gamma: share of the greatest possible entropy of the weights, `log2` of the number of anchors, from which on the
            chunk is computed in full. A single anchor is always trusted, as published.
        temperature: of the softmax over negative distances.
        anchors: most differences to average.
    """

    gamma: float = 0.3
    temperature: float = 1.0
    anchors: int = 20

    def __post_init__(self) -> None:
        if self.gamma < 0 or self.temperature <= 0 or self.anchors < 1:
            raise ValueError(
                f"gamma must be at least 0, temperature and anchors above it, got {self.gamma}, {self.temperature} "
                f"and {self.anchors}"
            )

    def adapt(self, place: PlacementContext, found: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Correct what was found, leave it if it is exact, or say why it is to be computed."""
        if isinstance(found, Miss):
            return found
        if place.base.exact_behind(place.prompt.ids[: place.span.start], place.prompt.prefix_ids):
            return AdaptedChunk(found, exact=True)
        if not follows_system_prefix(place):
            return Miss("no anchor was born behind what stands in front")
        where = (place.lm.fingerprint, place.prompt.prefix_ids, place.span.segment.stored_ids)
        slots = filled_slots(place.store, "difference", self.anchors, *where)
        same = [slot for slot in slots if slot.context == place.predecessors]
        for slot in same:
            chunk = read_checked(place.store, slot)
            if chunk is not None:
                return AdaptedChunk(
                    add_differences(found, [(1.0, chunk)], first_layer=1), exact=True, note=slot.key.base
                )
        return self._average(place, found, [slot for slot in slots if slot not in same])

    def _average(self, place: PlacementContext, found: ChunkKV, slots: list[Slot]) -> AdaptedChunk | Miss:
        if not slots:
            return Miss("no anchor")
        weights = self._weights([context_distance(slot, place.predecessors) for slot in slots])
        entropy, most = sum(w * math.log2(1 / w) for w in weights if w > 0), math.log2(len(slots))
        if entropy > self.gamma * most:
            return Miss(f"anchors disagree: entropy {entropy:.2f} of {most:.2f} bits")
        chosen = []
        for weight, slot in zip(weights, slots, strict=True):
            if weight < NEGLIGIBLE:
                continue
            chunk = read_checked(place.store, slot)
            if chunk is None:
                return Miss(f"{slot.key.base} cannot be read")
            chosen.append((weight, chunk))
        note = f"{len(chosen)} of {len(slots)} anchors, entropy {entropy:.2f} bits"
        return AdaptedChunk(add_differences(found, chosen, first_layer=1), note=note)

    def _weights(self, distances: list[float]) -> list[float]:
        nearest = min(distances)
        raised = [math.exp((nearest - one) / self.temperature) for one in distances]
        return [one / sum(raised) for one in raised]


def kvcomm(ratio: float = 0.0, gamma: float = 0.3, temperature: float = 1.0, anchors: int = 20) -> Method:
    """Add stored differences to framed caches; `engine.corpus.capture(groups, keep=("difference",), variants=20)` makes them.

    Args:
        ratio: share of the passage tokens to recompute besides, those the question attends to most. The paper
            recomputes none; this is ours, and its probe ProphetKV's.
        gamma: share of the weights' greatest entropy above which a passage is computed in full.
        temperature: of the softmax over anchors.
        anchors: most differences to try for each passage.
    """
    return Method(
        "kvcomm",
        FRAMED,
        adapter=AnchorOffsets(gamma, temperature, anchors),
        probe=QuestionProbe(layers="all", anchor_ratio=1.0),
        selector=TopTokens(),
        budget=FixedRatio(ratio),
    )
