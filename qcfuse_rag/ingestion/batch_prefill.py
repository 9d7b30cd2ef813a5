"""Prefill batches into a store: what a warming job does once it is planned, in its own process or in workers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.ingestion.enrichment import enrich_chunks
from qcfuse_rag.ingestion.prefill import prefill_chunk, prefill_chunks
from qcfuse_rag.ingestion.token_ranking import instruction_ids
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import hash_ids
from qcfuse_rag.store.prefill_base import BLIND, FRAMED, Base
from qcfuse_rag.store.quantization import LOSSLESS

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks to compute in one pass.

    Attributes:
        base: under which base.
        chunks: token ids of each.
        met: for an enriched base the token ids of the neighbours that stand before each, most related first.
        before: tokens that stand before an enriched chunk; of a last neighbour that is longer, its beginning.
    """

    base: Base
    chunks: tuple[Ids, ...]
    met: tuple[tuple[Ids, ...], ...] = ()
    before: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of its chunks."""
        return sum(map(len, self.chunks))


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch took: chunks and tokens stored, tokens computed for that, and bytes of keys and values."""

    chunks: int
    tokens: int
    computed_tokens: int
    size_bytes: int


class BatchPrefiller:
    """Computes batches and puts them into a store.

    Args:
        lm: the model.
        store: where to.
        prefix_ids: ids of the prompt's fixed head.
        primer: token ids of the text that primed bases are prefilled behind.
    """

    def __init__(self, lm: LanguageModel, store: KVStore, prefix_ids: Ids, primer: Ids) -> None:
        self._lm, self._store, self._frame, self._primer = lm, store, prefix_ids, primer
        self._primed_head: ChunkKV | None = None
        self._extra = len(instruction_ids(lm.tokenizer))

    def run(self, batch: Batch, head: ChunkKV | None) -> BatchResult:
        """Compute a batch and store it.

        Args:
            batch: whose chunks.
            head: what `head` returned.

        Raises:
            StoreError: if the store cannot be written.
        """
        begun = time.perf_counter()
        chunks = self.compute(batch, head)
        saved_ms = 1000 * (time.perf_counter() - begun) / batch.tokens
        for ids, chunk in zip(batch.chunks, chunks, strict=True):
            key = batch.base.key(self._lm.fingerprint, self._frame, ids)
            self._store.put(key, chunk, saved_ms=saved_ms * len(ids))
        computed = len(chunks) * (max(map(len, batch.chunks)) + self._extra)
        return BatchResult(len(chunks), batch.tokens, computed, sum(chunk.nbytes for chunk in chunks))

    def compute(self, batch: Batch, head: ChunkKV | None) -> list[ChunkKV]:
        """Return a batch's keys and values."""
        base, chunks = batch.base, list(batch.chunks)
        if base.enriched:
            first = [] if head is None else [("", head)]
            before = [[*first, *(self._first_pass(ids, head) for ids in met)] for met in batch.met]
            return enrich_chunks(self._lm, chunks, before, batch.before)
        prefix = head
        if base.primed:
            if self._primed_head is None:
                self._primed_head = prefill_chunk(self._lm, self._frame + self._primer)
            prefix = self._primed_head
        elif not base.after_prefix:
            ids = base.prefix(self._frame)
            prefix = prefill_chunk(self._lm, ids) if ids else None
        return prefill_chunks(self._lm, chunks, prefix=prefix, ranking=base.ranking)

    def head(self, *, store: bool = True) -> ChunkKV | None:
        """Return the exact keys and values of the prompt's fixed head, computing and storing them if need be.

        What a narrow format gave back would not do: chunks would then depend on whether the head was stored before.
        """
        if not self._frame:
            return None
        key = BLIND.key(self._lm.fingerprint, self._frame, self._frame)
        found = self._store.get(key)
        if isinstance(found, ChunkKV) and found.numbers == LOSSLESS:
            try:
                found.read()
            except CorruptEntry as error:
                self._store.discard(key, str(error))
            else:
                return found
        begun = time.perf_counter()
        computed = prefill_chunk(self._lm, self._frame)
        if store and key not in self._store:
            self._store.put(key, computed, saved_ms=1000 * (time.perf_counter() - begun))
        return computed

    def _first_pass(self, ids: Ids, head: ChunkKV | None) -> tuple[str, ChunkKV]:
        """Return a neighbour's `hash_ids` and framed cache: the stored one, else one computed for the moment."""
        found = self._store.get(FRAMED.key(self._lm.fingerprint, self._frame, ids))
        if isinstance(found, ChunkKV):
            try:
                found.read()
            except (CorruptEntry, OSError):
                pass
            else:
                return hash_ids(ids), found
        return hash_ids(ids), prefill_chunk(self._lm, ids, prefix=head)
