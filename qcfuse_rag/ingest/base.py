"""Bases: what a chunk is prefilled behind, hence which keys and values it starts from."""

from __future__ import annotations

from dataclasses import dataclass

from qcfuse_rag.model.fingerprint import Fingerprint
from qcfuse_rag.store.key import ChunkKey, hash_ids


@dataclass(frozen=True, slots=True)
class Base:
    """A way to prefill chunks.

    Attributes:
        name: part of every key.
        behind_frame: prefill behind the prompt's fixed head, whose keys and values are not kept with the chunk.
    """

    name: str
    behind_frame: bool

    def prefix(self, frame: tuple[int, ...]) -> tuple[int, ...]:
        """Return the token ids a chunk is prefilled behind, given the ids of the prompt's fixed head."""
        return frame if self.behind_frame else ()

    def key(self, fingerprint: Fingerprint, frame: tuple[int, ...], ids: tuple[int, ...]) -> ChunkKey:
        """Return the address of a chunk's keys and values under this base."""
        return ChunkKey(fingerprint, self.name, hash_ids(self.prefix(frame)), hash_ids(ids))


BLIND = Base("blind", behind_frame=False)
"""No prefix, positions from 0: what QCFuse, CacheBlend and PromptCache store. Every chunk grows a sink of its own."""

FRAMED = Base("framed", behind_frame=True)
"""Behind the prompt's fixed head: the first chunk of a prompt is exact, the others have no sinks of their own."""

BASES = {base.name: base for base in (BLIND, FRAMED)}
