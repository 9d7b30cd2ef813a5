"""The target of a warming job: a model, a store, and the fixed texts in front of the chunks; and its units of work."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property

from qcfuse_rag.ingestion.prefill import Ids, prefill_chunk
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import entry_bytes
from qcfuse_rag.store.key import Base, ChunkKey


@dataclass(frozen=True)
class PrefillTarget:
    """A model, the store that its caches go to, and the fixed texts in front of chunks.

    Attributes:
        lm: the model.
        store: the store.
        prefix_ids: token ids of the system prefix.
        primer: token ids in front of primed chunks, see `ingestion.primer`; empty without primed bases.
    """

    lm: LanguageModel
    store: KVStore
    prefix_ids: Ids
    primer: Ids = ()

    @cached_property
    def primed_prefix(self) -> ChunkKV:
        """Keys and values in front of primed chunks: system prefix and primer, some 900 tokens.

        They are computed once for all jobs, so that a job of one passage does not take twice as long for them.
        """
        return prefill_chunk(self.lm, self.prefix_ids + self.primer)

    def key(self, base: Base, ids: Ids) -> ChunkKey:
        """Return the key of a chunk under a base."""
        return base.key(self.lm.fingerprint, self.prefix_ids, ids)

    def entry_bytes(self, n_tokens: int) -> int:
        """Return the size in bytes of a chunk's entry in the store."""
        return entry_bytes(self.lm.shapes, self.lm.dtype, self.store.numbers, n_tokens)


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk of a job under one base.

    Attributes:
        index: first index of the chunk among the job's chunks.
        base: the base.
        key: the key of its entry.
        ids: its token ids, in four bytes each.
    """

    index: int
    base: Base
    key: ChunkKey
    ids: array[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks to compute in one pass.

    Attributes:
        base: base of all chunks.
        chunks: token ids of each chunk.
        origins: for a derived base, the token ids of the passages that each chunk's entry is made from, in their order;
            else empty.
        tokens_in_front: for a derived base, tokens in front of each chunk. Else 0.
    """

    base: Base
    chunks: tuple[Ids, ...]
    origins: tuple[tuple[Ids, ...], ...] = ()
    tokens_in_front: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(map(len, self.chunks))
