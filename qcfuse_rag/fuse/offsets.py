"""KVCOMM's adapter (arXiv 2510.12872): a framed cache, and an average of what other contexts changed in it.

The published system meets the same text under other prefixes (agents' instructions) and remembers, for up to twenty
"anchors", by how much its caches were off. It weighs anchors by the distance of their texts' values to this text's,
since its anchors are other texts, and aligns them by token index. Here all anchors are of the very same tokens, so
that index alignment is right, and such a distance would be zero for all: what tells them apart is the context, and the
weights follow `fuse.contexts.distance` instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qcfuse_rag.fuse.adapt import Adapted, Place
from qcfuse_rag.fuse.contexts import distance, stands_behind_head
from qcfuse_rag.fuse.corrected import corrected
from qcfuse_rag.fuse.sound import sound
from qcfuse_rag.ingest.context import Slot, filled_slots
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import Miss

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

    def adapt(self, place: Place, found: ChunkKV | Miss) -> Adapted | Miss:
        """Correct what was found, leave it if it is exact, or say why it is to be computed."""
        if isinstance(found, Miss):
            return found
        if place.base.exact_behind(place.prompt.ids[: place.span.start], place.prompt.frame):
            return Adapted(found, exact=True)
        if not stands_behind_head(place):
            return Miss("no anchor was born behind what stands in front")
        where = (place.lm.fingerprint, place.prompt.frame, place.span.segment.stored_ids)
        slots = filled_slots(place.store, "difference", self.anchors, *where)
        same = [slot for slot in slots if slot.context == place.predecessors]
        for slot in same:
            chunk = sound(place.store, slot)
            if chunk is not None:
                return Adapted(corrected(found, [(1.0, chunk)], first_layer=1), exact=True, note=slot.key.base)
        return self._average(place, found, [slot for slot in slots if slot not in same])

    def _average(self, place: Place, found: ChunkKV, slots: list[Slot]) -> Adapted | Miss:
        if not slots:
            return Miss("no anchor")
        weights = self._weights([distance(slot, place.predecessors) for slot in slots])
        entropy, most = sum(w * math.log2(1 / w) for w in weights if w > 0), math.log2(len(slots))
        if entropy > self.gamma * most:
            return Miss(f"anchors disagree: entropy {entropy:.2f} of {most:.2f} bits")
        chosen = []
        for weight, slot in zip(weights, slots, strict=True):
            if weight < NEGLIGIBLE:
                continue
            chunk = sound(place.store, slot)
            if chunk is None:
                return Miss(f"{slot.key.base} cannot be read")
            chosen.append((weight, chunk))
        note = f"{len(chosen)} of {len(slots)} anchors, entropy {entropy:.2f} bits"
        return Adapted(corrected(found, chosen, first_layer=1), note=note)

    def _weights(self, distances: list[float]) -> list[float]:
        nearest = min(distances)
        raised = [math.exp((nearest - one) / self.temperature) for one in distances]
        return [one / sum(raised) for one in raised]
