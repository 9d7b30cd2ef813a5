"""A second place to look for a chunk that is not stored under a method's base."""

from __future__ import annotations

from dataclasses import dataclass

from qcfuse_rag.fuse.adapt import Adapted, Place
from qcfuse_rag.ingest.base import Base
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import Miss


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Bases to fall back to, in this order; on request, those that are exact at a place come before the method's own.

    FusionRAG's alternative path (arXiv 2601.12904): instead of a prefix for every combination of earlier chunks there
    is one physical cache per chunk, found by dropping the earlier chunks from the path. Chunks here are addressed by
    head and content to begin with; what is left of the idea is the second key.

    Attributes:
        bases: where else to look.
        exact_first: take a chunk from one of them where it is what full prefill would give, whatever the method's own
            base has: a prompt's first passage, framed.
    """

    bases: tuple[Base, ...]
    exact_first: bool = False

    def adapt(self, place: Place, found: ChunkKV | Miss) -> Adapted | Miss:
        """Return the chunk under the first base that has it."""
        frame, before = place.prompt.frame, place.prompt.ids[: place.span.start]
        if self.exact_first and not place.base.exact_behind(before, frame):
            for base in (one for one in self.bases if one.exact_behind(before, frame)):
                key = base.key(place.lm.fingerprint, frame, place.span.segment.stored_ids)
                other = place.store.get(key)
                if isinstance(other, ChunkKV):
                    return Adapted(other, exact=True, key=key)
        if isinstance(found, ChunkKV):
            return Adapted(found, place.base.exact_behind(before, frame))
        for base in self.bases:
            key = base.key(place.lm.fingerprint, frame, place.span.segment.stored_ids)
            other = place.store.get(key)
            if isinstance(other, ChunkKV):
                note = f"{base.name} instead of {place.base.name}"
                return Adapted(other, base.exact_behind(before, frame), note=note, key=key)
        return found
