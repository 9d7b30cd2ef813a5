"""Bases: the tokens a chunk is prefilled behind, and hence the keys and values that are stored for it."""

from __future__ import annotations

from dataclasses import dataclass

from qcfuse_rag.models.fingerprint import Fingerprint, digest
from qcfuse_rag.store.key import ChunkKey, hash_ids


@dataclass(frozen=True, slots=True)
class Base:
    """A way to prefill chunks. Methods may add bases that they compute themselves, see `ingestion.extension`.

    Attributes:
        name: part of every key.
        after_prefix: prefill behind the system prefix, whose keys and values are not stored with the chunk.
        primed: prefill behind the system prefix and a few fixed passages, see `ingestion.primer`.
        derived: prefill behind other passages too, which differ from chunk to chunk.
        revision: part of every key; another one is another text in front of the chunks under the same name.
    """

    name: str
    after_prefix: bool
    primed: bool = False
    derived: bool = False
    revision: int = 1

    def prefix(self, prefix_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the token ids a chunk is prefilled behind, given those of the system prefix.

        They do not include other passages or the primer's text: these are not in the prompt.
        """
        return prefix_ids if self.after_prefix else ()

    def exact_at(self, start: int, ids: tuple[int, ...], prefix_ids: tuple[int, ...]) -> bool:
        """Return whether a chunk at position `start` of a prompt of `ids` equals what full prefill would compute."""
        if self.derived or self.primed:
            return False
        prefix = self.prefix(prefix_ids)
        return start == len(prefix) and ids[:start] == prefix

    def key(self, fingerprint: Fingerprint, prefix_ids: tuple[int, ...], ids: tuple[int, ...]) -> ChunkKey:
        """Return the address of a chunk's keys and values under this base."""
        prefix = hash_ids(self.prefix(prefix_ids))
        if self.revision > 1:
            prefix = digest(f"{prefix} {self.revision}".encode())
        return ChunkKey(fingerprint, self.name, prefix, hash_ids(ids))


BLIND = Base("blind", after_prefix=False)
"""No prefix, positions from 0: what QCFuse, CacheBlend and PromptCache store. Every chunk has an attention sink."""

FRAMED = Base("framed", after_prefix=True)
"""Behind the system prefix: the first chunk of a prompt is exact, the others have no attention sinks of their own."""

PRIMED = Base("primed", after_prefix=True, primed=True, revision=2)
"""Behind the system prefix and fixed passages: none is first in its context, and none carries a passage of yours."""

BASES = {base.name: base for base in (BLIND, FRAMED, PRIMED)}
"""The bases that need no method; `methods.find_base` knows those of methods too."""
