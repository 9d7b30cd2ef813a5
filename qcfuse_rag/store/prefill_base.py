"""Bases: the tokens a chunk is prefilled behind, and hence the keys and values that are stored for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from qcfuse_rag.models.fingerprint import Fingerprint, digest
from qcfuse_rag.store.key import ChunkKey, hash_ids

Ranking = Literal["instruction", "kvzip", "knorm", "sinks"]
"""How a chunk's tokens are ranked when it is stored; see `ingestion.token_ranking`."""


@dataclass(frozen=True, slots=True)
class Base:
    """A way to prefill chunks.

    Attributes:
        name: part of every key.
        after_prefix: prefill behind the system prefix, whose keys and values are not stored with the chunk.
        enriched: prefill behind the stored caches of related chunks too, see `ingestion.enrichment`.
        primed: prefill behind the system prefix and a few fixed passages, see `ingestion.primer`.
        dummies: prefill behind so many copies of the prompt's first token instead of the system prefix.
        ranking: how the chunk's tokens are ranked.
        revision: part of every key; another one is another text in front of the chunks under the same name.
    """

    name: str
    after_prefix: bool
    enriched: bool = False
    primed: bool = False
    dummies: int = 0
    ranking: Ranking = "instruction"
    revision: int = 1

    def prefix(self, prefix_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the token ids a chunk is prefilled behind, given those of the system prefix.

        They do not include the neighbours of an enriched chunk or the primer's text: these are not in the prompt.
        """
        return prefix_ids if self.after_prefix else prefix_ids[:1] * self.dummies

    def exact_at(self, start: int, ids: tuple[int, ...], prefix_ids: tuple[int, ...]) -> bool:
        """Return whether a chunk at position `start` of a prompt of `ids` equals what full prefill would compute."""
        if self.enriched or self.primed:
            return False
        prefix = self.prefix(prefix_ids)
        return start == len(prefix) and ids[:start] == prefix

    def key(self, fingerprint: Fingerprint, prefix_ids: tuple[int, ...], ids: tuple[int, ...]) -> ChunkKey:
        """Return the address of a chunk's keys and values under this base."""
        prefix = hash_ids(self.prefix(prefix_ids))
        if self.revision > 1:
            prefix = digest(f"{prefix} {self.revision}".encode())
        return ChunkKey(fingerprint, self.name, prefix, hash_ids(ids))

    def ranked(self, ranking: Ranking) -> Base:
        """Return the same base with another ranking of tokens; its chunks are separate entries."""
        if ranking == self.ranking:
            return self
        plain = self.name.split("+")[0]
        name = plain if ranking == "instruction" else f"{plain}+{ranking}"
        return replace(self, name=name, ranking=ranking)


BLIND = Base("blind", after_prefix=False)
"""No prefix, positions from 0: what QCFuse, CacheBlend and PromptCache store. Every chunk has an attention sink."""

FRAMED = Base("framed", after_prefix=True)
"""Behind the system prefix: the first chunk of a prompt is exact, the others have no attention sinks of their own."""

ENRICHED = Base("enriched", after_prefix=True, enriched=True)
"""Behind the system prefix and related chunks' caches: FusionRAG's (arXiv 2601.12904) preliminary cross-attention."""

PRIMED = Base("primed", after_prefix=True, primed=True, revision=2)
"""Behind the system prefix and fixed passages: none is first in its context, and none carries a passage of yours."""

BEGUN = Base("begun", after_prefix=False, dummies=4)
"""Behind four copies of the first token of every prompt, which become the attention sink instead of the chunk: EPIC's
LegoLink-0 (arXiv 2410.15332). Independent of the prompt's wording."""

BASES = {base.name: base for base in (BLIND, FRAMED, PRIMED, BEGUN, ENRICHED)}


def unknown_base(names: Iterable[str]) -> str | None:
    """Return what is wrong with the first of some names that is no base's; None if all are bases."""
    unknown = next((name for name in names if name not in BASES), None)
    return None if unknown is None else f"there is no base {unknown!r}; there are {', '.join(BASES)}"
