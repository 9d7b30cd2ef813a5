"""Look up the neighbours in front of each enriched chunk of a job."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qcfuse_rag.ingestion.enrichment import NeighbourPrefix, fit_neighbours
from qcfuse_rag.ingestion.provenance_ledger import ProvenanceLedger
from qcfuse_rag.ingestion.target import Ids, PendingChunk, PrefillTarget
from qcfuse_rag.ingestion.token_ranking import instruction_ids
from qcfuse_rag.store.key import ChunkKey

Staleness = Callable[[ChunkKey, Sequence[Ids]], float]
"""`(key, neighbours) -> share` of a chunk's current neighbours that its stored enriched entry was not made from."""


@dataclass(frozen=True, slots=True)
class EnrichmentPlan:
    """The neighbours of a job's chunks, and the record of what its entries are made from.

    Attributes:
        neighbours: for each chunk, the indices of related chunks, most related first.
        others: token ids of chunks that are not stored by the job but may be neighbours; their indices follow those of
            the job's chunks.
        ledger: records the origins of enriched entries; None records nothing.
        staleness: measures how outdated a stored entry is; None leaves stored entries alone.
    """

    neighbours: Sequence[Sequence[int]]
    others: Sequence[Ids] = ()
    ledger: ProvenanceLedger | None = None
    staleness: Staleness | None = None


class NeighbourTable:
    """The neighbours that stand in front of each enriched chunk.

    Args:
        target: the model and the system prefix.
        chunks: token ids of the job's chunks.
        plan: their neighbours.
    """

    def __init__(self, target: PrefillTarget, chunks: Sequence[array[int]], plan: EnrichmentPlan) -> None:
        self._context_tokens, self._prefix_tokens = target.lm.context_window.tokens, len(target.prefix_ids)
        self._instruction_tokens = len(instruction_ids(target.lm.tokenizer))
        self._ids = [*chunks, *(array("i", ids) for ids in plan.others)]
        self._neighbours, self._staleness = plan.neighbours, plan.staleness

    def of(self, chunk: PendingChunk) -> tuple[Ids, ...]:
        """Return the token ids of the neighbours in front of a chunk, most related first."""
        related = self._related(chunk)
        return tuple(tuple(self._ids[index]) for index in related[: self._prefix(chunk, related).neighbours])

    def prefix_tokens(self, chunk: PendingChunk) -> int:
        """Return the number of tokens in front of a chunk: the system prefix and the neighbours."""
        return self._prefix(chunk, self._related(chunk)).length

    def staleness(self, chunk: PendingChunk) -> float:
        """Return the share of a chunk's neighbours that its stored entry was not made from, in [0, 1]."""
        return 0.0 if self._staleness is None else self._staleness(chunk.key, self.of(chunk))

    def _prefix(self, chunk: PendingChunk, related: Sequence[int]) -> NeighbourPrefix:
        lengths = [len(self._ids[index]) for index in related]
        return fit_neighbours(
            len(chunk.ids) + self._instruction_tokens, self._prefix_tokens, lengths, self._context_tokens
        )

    def _related(self, chunk: PendingChunk) -> list[int]:
        """Return the indices of a chunk's neighbours, best first: never its own text, and no text twice."""
        neighbours = self._neighbours[chunk.index]
        first_index = {tuple(self._ids[index]): index for index in reversed(neighbours)}
        first_index.pop(tuple(chunk.ids), None)
        return [index for index in neighbours if index in first_index.values()]
