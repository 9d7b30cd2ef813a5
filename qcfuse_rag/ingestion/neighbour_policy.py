"""Whom a passage meets before it is stored: its neighbours, who may be one, and what becomes of it when they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.ingestion.enrichment import NEIGHBOURS
from qcfuse_rag.ingestion.neighbours import (
    merge_rankings,
    nearest_chunks,
    permitted_neighbours,
    retrieved_together,
    token_vectors,
)
from qcfuse_rag.ingestion.provenance_ledger import ProvenanceLedger
from qcfuse_rag.ingestion.warm_job import Staleness
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.documents.acl import may_remember
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import FRAMED

Ids = tuple[int, ...]


class NeighbourPolicy:
    """What a store's sources say of passages that are prefilled behind others.

    Args:
        lm: the model.
        prefix_ids: ids of the prompt's fixed head.
        sources: of the store; asked for when first needed, since that opens a file.
    """

    def __init__(self, lm: LanguageModel, prefix_ids: Ids, sources: Callable[[], Sources]) -> None:
        self._lm, self._frame, self._sources = lm, prefix_ids, sources

    def neighbours(
        self,
        chunks: Sequence[Ids],
        others: Sequence[Ids],
        *,
        given: Sequence[Sequence[int]] | None = None,
        vectors: NDArray[np.float32] | None = None,
        retrievals: Sequence[Sequence[int]] = (),
    ) -> Sequence[Sequence[int]]:
        """Return each chunk's neighbours, best first; only such as all its readers may read.

        Args:
            chunks: token ids of the passages to store.
            others: of passages that may be neighbours; their indices follow.
            given: the neighbours, if they are known.
            vectors: `[len(chunks) + len(others), D]`, embeddings; by the model's own tokens if None.
            retrievals: indices of what was retrieved together; such company comes before what is merely alike.

        Raises:
            ValueError: if there are not as many vectors as passages.
        """
        pool = [*chunks, *others]
        readers = [self._readers(ids) for ids in pool] if self._sources().restricted else None
        if given is not None:
            return given if readers is None else permitted_neighbours(given, readers)
        vectors = token_vectors(self._lm, pool) if vectors is None else vectors
        if len(vectors) != len(pool):
            raise ValueError(f"{len(vectors)} vectors for {len(pool)} passages")
        found = nearest_chunks(vectors, NEIGHBOURS, readers)[: len(chunks)]
        if not retrievals:
            return found
        met = retrieved_together(retrievals, len(pool), NEIGHBOURS)[: len(chunks)]
        return merge_rankings(met if readers is None else permitted_neighbours(met, readers), found, NEIGHBOURS)

    def staleness(self, pool: Sequence[Ids]) -> Staleness:
        """Return what tells how many of a passage's present neighbours its entry was not made of.

        An entry that was made of passages which are not in the pool is left alone: a job that was given a part of the
        corpus would find it worse neighbours.
        """
        known = frozenset(self._name(ids) for ids in pool if ids)

        def stale(key: ChunkKey, neighbours: Sequence[Ids]) -> float:
            then, now = self._sources().made_of(key), {self._name(ids) for ids in neighbours if ids}
            return len(now - then) / len(now) if now and then <= known else 0.0

        return stale

    def permitted_group(self, group: Sequence[Ids]) -> list[Ids]:
        """Leave out passages that not all who may read a later one of the group may read."""
        if not self._sources().restricted:
            return list(group)
        readers = [self._readers(ids) for ids in group]
        return [
            ids
            for place, ids in enumerate(group)
            if all(may_remember(later, readers[place]) for later in readers[place + 1 :])
        ]

    def ledger(self) -> ProvenanceLedger:
        """Return where a job that is being planned notes what its entries are made of.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        return ProvenanceLedger(self._sources, self._key, self._sources().losses)

    def _readers(self, ids: Ids) -> frozenset[str]:
        return self._sources().readers(self._key(ids)) if ids else frozenset()

    def _name(self, ids: Ids) -> str:
        return self._sources().passage(self._key(ids))

    def _key(self, ids: Ids) -> ChunkKey:
        return FRAMED.key(self._lm.fingerprint, self._frame, ids)
