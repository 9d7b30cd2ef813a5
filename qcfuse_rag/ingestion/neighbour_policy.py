"""Choose the neighbours an enriched passage is prefilled behind: similarity, access control, staleness."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.ingestion.enrichment import NEIGHBOURS
from qcfuse_rag.ingestion.neighbour_table import EnrichmentPlan, Staleness
from qcfuse_rag.ingestion.neighbours import (
    merge_rankings,
    nearest_chunks,
    permitted_neighbours,
    retrieved_together,
    token_vectors,
)
from qcfuse_rag.ingestion.provenance_ledger import ProvenanceLedger
from qcfuse_rag.ingestion.target import Ids
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.documents.acl import may_be_built_on
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import FRAMED


class NeighbourPolicy:
    """Choose neighbours by what a store's sources say about access and origins.

    Args:
        lm: the model.
        prefix_ids: token ids of the system prefix.
        sources: returns the store's sources; called when they are first needed, because that opens a file.
    """

    def __init__(self, lm: LanguageModel, prefix_ids: Ids, sources: Callable[[], Sources]) -> None:
        self._lm, self._prefix_ids, self._sources = lm, prefix_ids, sources

    def plan(
        self,
        chunks: Sequence[Ids],
        others: Sequence[Ids] = (),
        *,
        neighbours: Sequence[Sequence[int]] | None = None,
        vectors: NDArray[np.float32] | None = None,
        retrievals: Sequence[Sequence[int]] = (),
    ) -> EnrichmentPlan:
        """Choose the neighbours for a job; all readers of a passage may read its neighbours.

        Args:
            chunks: token ids of the passages to store.
            others: token ids of passages that may be neighbours; their indices follow those of `chunks`.
            neighbours: for each passage the indices of related ones, best first; None chooses them.
            vectors: `[len(chunks) + len(others), D]`, embeddings; None uses the model's own token embeddings.
            retrievals: indices of passages that were retrieved together, one sequence for each retrieval. These
                neighbours come before those with near vectors.

        Raises:
            ValueError: if the number of vectors differs from the number of passages.
            StoreError: if the manifest cannot be read.
        """
        ledger = self.ledger()  # first: passages deleted from here on count as lost during the job
        pool = [*chunks, *others]
        readers = [self._readers(ids) for ids in pool] if self._sources().has_restricted() else None
        if neighbours is not None:
            chosen = neighbours if readers is None else permitted_neighbours(neighbours, readers)
        else:
            vectors = token_vectors(self._lm, pool) if vectors is None else vectors
            if len(vectors) != len(pool):
                raise ValueError(f"{len(vectors)} vectors for {len(pool)} passages")
            chosen = nearest_chunks(vectors, NEIGHBOURS, readers)[: len(chunks)]
            if retrievals:
                together = retrieved_together(retrievals, len(pool), NEIGHBOURS)[: len(chunks)]
                together = together if readers is None else permitted_neighbours(together, readers)
                chosen = merge_rankings(together, chosen, NEIGHBOURS)
        return EnrichmentPlan(chosen, others, ledger, self._staleness(pool))

    def permitted_group(self, group: Sequence[Ids]) -> list[Ids]:
        """Leave out passages that some reader of a later passage of the group must not read."""
        if not self._sources().has_restricted():
            return list(group)
        readers = [self._readers(ids) for ids in group]
        return [
            ids
            for index, ids in enumerate(group)
            if all(may_be_built_on(later, readers[index]) for later in readers[index + 1 :])
        ]

    def ledger(self) -> ProvenanceLedger:
        """Return the ledger for a job that is being planned.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        return ProvenanceLedger(self._sources, self._key, self._sources().derivations.loss_count())

    def _staleness(self, pool: Sequence[Ids]) -> Staleness:
        """Return a function that measures which share of a passage's current neighbours its entry was not made from.

        An entry made from passages outside the pool is never stale: a job over a part of the corpus would find worse
        neighbours.
        """
        known = frozenset(self._name(ids) for ids in pool if ids)

        def staleness(key: ChunkKey, neighbours: Sequence[Ids]) -> float:
            origins, current = self._sources().derivations.origins(key), {self._name(ids) for ids in neighbours if ids}
            return len(current - origins) / len(current) if current and origins <= known else 0.0

        return staleness

    def _readers(self, ids: Ids) -> frozenset[str]:
        return self._sources().readers(self._key(ids)) if ids else frozenset()

    def _name(self, ids: Ids) -> str:
        return self._sources().passage_id(self._key(ids))

    def _key(self, ids: Ids) -> ChunkKey:
        return FRAMED.key(self._lm.fingerprint, self._prefix_ids, ids)
