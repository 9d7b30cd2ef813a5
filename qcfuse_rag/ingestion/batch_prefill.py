"""Prefill planned batches into a store, in the job's own process or in a worker."""

from __future__ import annotations

import time
from dataclasses import dataclass

from qcfuse_rag.ingestion.enrichment import enrich_chunks
from qcfuse_rag.ingestion.prefill import prefill_chunk, prefill_chunks
from qcfuse_rag.ingestion.target import Ids, PrefillTarget
from qcfuse_rag.ingestion.token_ranking import instruction_ids
from qcfuse_rag.store.backends.base import check_entry, get_checked
from qcfuse_rag.store.chunk import ChunkKV, to_store_format
from qcfuse_rag.store.key import hash_ids
from qcfuse_rag.store.prefill_base import BLIND, FRAMED, Base
from qcfuse_rag.store.quantization import LOSSLESS


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks to compute in one pass.

    Attributes:
        base: base of all chunks.
        chunks: token ids of each chunk.
        neighbours: for an enriched base, the token ids of each chunk's neighbours, most related first; else empty.
        prefix_tokens: for an enriched base, tokens in front of each chunk; the last neighbour is cut to fit. Else 0.
    """

    base: Base
    chunks: tuple[Ids, ...]
    neighbours: tuple[tuple[Ids, ...], ...] = ()
    prefix_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(map(len, self.chunks))


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The size of a stored batch.

    Attributes:
        chunks: chunks stored.
        tokens: tokens stored.
        computed_tokens: tokens computed for them, ranking instruction and padding included.
        size_bytes: bytes of keys and values in the store's format.
    """

    chunks: int
    tokens: int
    computed_tokens: int
    size_bytes: int


class BatchPrefiller:
    """Compute batches and put them into a store.

    Args:
        target: the model, the store, the system prefix and the primer.
    """

    def __init__(self, target: PrefillTarget) -> None:
        self._target = target
        self._instruction_tokens = len(instruction_ids(target.lm.tokenizer))

    def run(self, batch: Batch, system_prefix: ChunkKV | None) -> BatchResult:
        """Compute a batch and store it.

        Args:
            batch: the batch.
            system_prefix: the result of `system_prefix`.

        Raises:
            StoreError: if the store cannot be written.
        """
        started = time.perf_counter()
        chunks, size = self.compute(batch, system_prefix), 0
        ms_per_token = 1000 * (time.perf_counter() - started) / batch.tokens
        for ids, chunk in zip(batch.chunks, chunks, strict=True):
            converted = to_store_format(chunk, self._target.store.numbers)
            self._target.store.put(self._target.key(batch.base, ids), converted, saved_ms=ms_per_token * len(ids))
            size += converted.nbytes
        computed = len(chunks) * (max(map(len, batch.chunks)) + self._instruction_tokens)
        return BatchResult(len(chunks), batch.tokens, computed, size)

    def compute(self, batch: Batch, system_prefix: ChunkKV | None) -> list[ChunkKV]:
        """Return the keys and values of a batch's chunks."""
        target, base, chunks = self._target, batch.base, list(batch.chunks)
        if base.enriched:
            shared = [] if system_prefix is None else [("", system_prefix)]
            prefixes = [
                [*shared, *(self._framed(ids, system_prefix) for ids in neighbours)] for neighbours in batch.neighbours
            ]
            return enrich_chunks(target.lm, chunks, prefixes, batch.prefix_tokens)
        prefix = system_prefix
        if base.primed:
            prefix = target.primed_prefix
        elif not base.after_prefix:
            ids = base.prefix(target.prefix_ids)
            prefix = prefill_chunk(target.lm, ids) if ids else None
        return prefill_chunks(target.lm, chunks, prefix=prefix, ranking=base.ranking)

    def system_prefix(self, *, store: bool = True) -> ChunkKV | None:
        """Return the exact keys and values of the system prefix, or None if the prompt has none.

        A quantized copy is not used: chunks would then depend on whether the prefix was stored before them.

        Args:
            store: store the prefix if it had to be computed.
        """
        target = self._target
        if not target.prefix_ids:
            return None
        key = target.key(BLIND, target.prefix_ids)
        stored = target.store.get(key)
        if (
            isinstance(stored, ChunkKV)
            and stored.numbers == LOSSLESS
            and check_entry(target.store, key, stored) is None
        ):
            return stored
        started = time.perf_counter()
        computed = prefill_chunk(target.lm, target.prefix_ids)
        if store and key not in target.store:
            target.store.put(key, computed, saved_ms=1000 * (time.perf_counter() - started))
        return computed

    def _framed(self, ids: Ids, system_prefix: ChunkKV | None) -> tuple[str, ChunkKV]:
        """Return a neighbour's `hash_ids` and its framed cache, computed if the store cannot give it."""
        stored = get_checked(self._target.store, self._target.key(FRAMED, ids))
        if isinstance(stored, ChunkKV):
            return hash_ids(ids), stored
        return hash_ids(ids), prefill_chunk(self._target.lm, ids, prefix=system_prefix)
