"""FusionRAG (arXiv 2601.12904): prefill chunks behind likely neighbours; recompute what the question attends to.

A first pass prefills every chunk behind the system prefix. A second pass prefills it again, behind the system prefix
and the first-pass caches of the most related chunks. The stored cache keeps its size, and the neighbours are not used
at question time. Enriched caches are made from first-pass caches only, never from other enriched ones, so the result
does not depend on the order of the work.

Chunks with prefixes of the same length are enriched together. Uncut prefixes rarely have the same length. So the last
neighbour is cut at its end, by at most a sixteenth of all neighbours; the cut does not depend on the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.fusion.method import ATTENTION, Choice, FixedRatio, Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.ingestion.extension import ComputedBase, EntryWriter, Related
from qcfuse_rag.ingestion.prefill import (
    Batch,
    Ids,
    PendingChunk,
    PrefillTarget,
    instruction_ids,
    prefill_chunk,
    prefill_chunks,
)
from qcfuse_rag.ingestion.similarity import nearest_chunks, token_vectors
from qcfuse_rag.store.backends.base import get_checked
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.documents.sources import may_be_built_on
from qcfuse_rag.store.key import FRAMED, Base, hash_ids

NEIGHBOURS = 10
"""The paper's number; the paper finds 5 nearly as good and 15 worse."""
GRAINS = 16


@dataclass(frozen=True, slots=True)
class EnrichedBase(ComputedBase):
    """Behind the system prefix and related chunks' caches: FusionRAG's preliminary cross-attention."""

    @property
    def requires(self) -> tuple[Base, ...]:
        """The framed base, whose caches the enriched ones are made from."""
        return (FRAMED,)

    def plan(
        self, target: PrefillTarget, chunks: Sequence[Ids], related: Related, writer: EntryWriter | None
    ) -> NeighbourPlan:
        """Choose the neighbours of each chunk; all readers of a chunk may read its neighbours.

        Raises:
            ValueError: if the number of neighbours or vectors differs from the number of chunks.
        """
        pool = [*chunks, *related.others]
        readers = [writer.readers(ids) for ids in pool] if writer is not None and writer.has_restricted() else None
        chosen = related.neighbours
        if chosen is None:
            vectors = token_vectors(target.lm, pool) if related.vectors is None else related.vectors
            if len(vectors) != len(pool):
                raise ValueError(f"{len(vectors)} vectors for {len(pool)} passages")
            chosen = nearest_chunks(vectors, NEIGHBOURS, readers)
            if related.retrievals:  # passages that were retrieved together come before those that are merely near
                together = permitted_neighbours(
                    retrieved_together(related.retrievals, len(pool), NEIGHBOURS)[: len(chunks)], readers
                )
                pairs = zip(together, chosen, strict=False)
                chosen = [list(dict.fromkeys((*best, *rest)))[:NEIGHBOURS] for best, rest in pairs]
            chosen = chosen[: len(chunks)]
        if len(chosen) != len(chunks):
            raise ValueError(
                f"an enriched base needs the neighbours of all {len(chunks)} chunks, got those of {len(chosen)}"
            )
        return NeighbourPlan(target, pool, permitted_neighbours(chosen, readers), writer)

    def compute(self, target: PrefillTarget, batch: Batch, system_prefix: ChunkKV | None) -> list[ChunkKV]:
        """Prefill chunks, each behind the caches of its own neighbours; their `context` names the neighbours."""
        shared = [] if system_prefix is None else [system_prefix]
        prefix = None
        if batch.tokens_in_front:
            prefix = [
                join_chunks(
                    [*shared, *(_framed(target, ids, system_prefix) for ids in origins)],
                    batch.tokens_in_front,
                    target.lm.device,
                )
                for origins in batch.origins
            ]
        chunks = prefill_chunks(target.lm, batch.chunks, prefix=prefix)
        return [
            replace(chunk, notes={"context": list(map(hash_ids, origins))})
            for chunk, origins in zip(chunks, batch.origins, strict=True)
        ]


ENRICHED = EnrichedBase("enriched", after_prefix=True, derived=True)
"""The base of FusionRAG's caches."""


class NeighbourPlan:
    """The neighbours in front of each enriched chunk of a job, as indices of the job's chunks and other passages."""

    def __init__(
        self,
        target: PrefillTarget,
        pool: Sequence[Ids],
        neighbours: Sequence[Sequence[int]],
        writer: EntryWriter | None,
    ) -> None:
        self._target, self._pool, self._neighbours, self._writer = target, pool, neighbours, writer
        self._query_tokens = len(instruction_ids(target.lm.tokenizer))
        self._known = frozenset(() if writer is None else (writer.name(ids) for ids in pool if ids))

    def origins(self, chunk: PendingChunk) -> tuple[Ids, ...]:
        """Return the token ids of the neighbours in front of a chunk, most related first."""
        related = self._related(chunk)
        return tuple(related[: self._prefix(chunk, related).neighbours])

    def tokens_in_front(self, chunk: PendingChunk) -> int:
        """Return the number of tokens in front of a chunk: the system prefix and the neighbours."""
        return self._prefix(chunk, self._related(chunk)).length

    def staleness(self, chunk: PendingChunk) -> float:
        """Return the share of a chunk's neighbours that its stored entry was not made from."""
        return 0.0 if self._writer is None else self._writer.lacking(chunk.key, self.origins(chunk), self._known)

    def _prefix(self, chunk: PendingChunk, related: Sequence[Ids]) -> NeighbourPrefix:
        return fit_neighbours(
            len(chunk.ids) + self._query_tokens,
            len(self._target.prefix_ids),
            list(map(len, related)),
            self._target.lm.context_window.tokens,
        )

    def _related(self, chunk: PendingChunk) -> list[Ids]:
        """Return a chunk's neighbours, best first: never its own text, and no text twice."""
        own = tuple(chunk.ids)
        texts = dict.fromkeys(tuple(self._pool[index]) for index in self._neighbours[chunk.index])
        return [ids for ids in texts if ids != own]


class NeighbourPrefix(NamedTuple):
    """How many neighbours are in front of a chunk, and the tokens of system prefix and neighbours, the last one cut."""

    neighbours: int
    length: int


def fit_neighbours(
    n_tokens: int, prefix_tokens: int, neighbour_tokens: Sequence[int], context_tokens: int
) -> NeighbourPrefix:
    """Choose how many neighbours stand in front of a chunk and its instruction: as many as fit the context window."""
    total, count = 0, 0
    for tokens in neighbour_tokens:
        if prefix_tokens + total + tokens + n_tokens > context_tokens:
            break
        total, count = total + tokens, count + 1
    grain = 1 << max(0, (total // GRAINS).bit_length() - 1)
    length = total - total % grain
    while count and sum(neighbour_tokens[: count - 1]) >= length:
        count -= 1  # nothing of the last neighbour is left
    return NeighbourPrefix(count, prefix_tokens + length)


def join_chunks(chunks: Sequence[ChunkKV], length: int, device: torch.device) -> ChunkKV:
    """Join chunks end to end and return the first `length` tokens, on a device; unrotated keys need no change.

    The tokens are ranked in their order, because a prefix is never probed.
    """
    if len(chunks) == 1 and length == chunks[0].n_tokens:
        return chunks[0]
    keys, values = [], []
    for layer in range(chunks[0].n_layers):
        parts = [chunk.layer(layer) for chunk in chunks]
        keys.append(torch.cat([part[0].to(device) for part in parts], dim=1)[:, :length])
        values.append(torch.cat([part[1].to(device) for part in parts], dim=1)[:, :length])
    return ChunkKV.of(keys, values, torch.arange(length).expand(len(keys), -1))


def _framed(target: PrefillTarget, ids: Ids, system_prefix: ChunkKV | None) -> ChunkKV:
    """Return a neighbour's framed cache, computed if the store cannot give it."""
    stored = get_checked(target.store, target.key(FRAMED, ids))
    return stored if isinstance(stored, ChunkKV) else prefill_chunk(target.lm, ids, prefix=system_prefix)


def permitted_neighbours(
    neighbours: Sequence[Sequence[int]], readers: Sequence[frozenset[str]] | None
) -> list[list[int]]:
    """Remove neighbours that some readers of a chunk must not read; None if everybody may read every chunk."""
    return [
        [other for other in related if readers is None or may_be_built_on(readers[index], readers[other])]
        for index, related in enumerate(neighbours)
    ]


def retrieved_together(retrievals: Sequence[Sequence[int]], chunks: int, n: int) -> list[list[int]]:
    """Return up to `n` chunks that each of the chunks was retrieved with, the most frequent first."""
    counts: list[Counter[int]] = [Counter() for _ in range(chunks)]
    for retrieval in retrievals:
        for index in retrieval:
            counts[index].update(other for other in set(retrieval) if other != index)
    return [
        [other for other, _ in sorted(counter.items(), key=lambda pair: (-pair[1], pair[0]))[:n]] for counter in counts
    ]


CHOICE = Choice("the question pays them the most attention in the last layer", ATTENTION)


def fusionrag(
    ratio: float = 0.15,
    base: Base = ENRICHED,
    probe: Literal["question_over_cache", "question_only"] = "question_over_cache",
    alternative: bool = True,
) -> Method:
    """Recompute the passage tokens that the question attends to in the last layer, over enriched caches.

    Args:
        ratio: share of the passage tokens to recompute.
        base: which stored caches to start from; the paper uses enriched caches.
        probe: what the question sees on its way to the last layer: the stored chunks, or only itself. The paper can be
            read both ways.
        alternative: take the framed cache of a chunk that is not enriched yet. This is what remains of the paper's
            alternative path: chunks are addressed by system prefix and content, not by the chunks before them.
    """
    if probe not in ("question_over_cache", "question_only"):
        raise UnknownMethod(f"there is no probe {probe!r} of fusionrag, only question_over_cache and question_only")
    anchor_ratio = 1.0 if probe == "question_over_cache" else 0.0
    return Method(
        "fusionrag",
        base,
        choice=CHOICE,
        fallbacks=(FRAMED,) if alternative and base.derived else (),
        probe=QuestionProbe(layers="last", anchor_ratio=anchor_ratio),
        selector=TopTokens(),
        budget=FixedRatio(ratio),
    )
