"""Adapters: alter or replace a stored chunk by what stands before it in this prompt, before it is placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from qcfuse_rag.ingest.base import Base
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.prompt.segments import Prompt, Span
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore, Miss
from qcfuse_rag.store.key import ChunkKey, hash_ids


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk is about to stand.

    Attributes:
        lm: the model.
        store: where its chunks are kept.
        prompt: the prompt.
        span: the chunk's place in it.
        base: the method's base, under which the chunk was looked up.
    """

    lm: LanguageModel
    store: KVStore
    prompt: Prompt
    span: Span
    base: Base

    @property
    def predecessors(self) -> tuple[str, ...]:
        """Hashes of the token ids of the chunks in front, in order."""
        before = [span for span in self.prompt.chunks if span.stop <= self.span.start]
        return tuple(hash_ids(span.segment.stored_ids) for span in before)


@dataclass(frozen=True, slots=True, eq=False)
class Adapted:
    """What to place.

    Attributes:
        chunk: keys and values.
        exact: whether a full prefill of this prompt would give the same.
        demand: the share of its tokens that ought to be recomputed, for budgets that ask; None if not known.
        note: what was done, in words, for the report.
        key: the entry it came from, if not the one looked up; discarded should it prove damaged.
    """

    chunk: ChunkKV
    exact: bool = False
    demand: float | None = None
    note: str | None = None
    key: ChunkKey | None = None


class Adapter(Protocol):
    """Decides what is placed for a chunk."""

    def adapt(self, place: Place, found: ChunkKV | Miss) -> Adapted | Miss:
        """Choose or alter.

        Args:
            place: where the chunk is to stand.
            found: what the store had under the method's base, or why it had nothing.

        Returns:
            What to place, or the reason to compute the chunk in full.
        """
        ...


@runtime_checkable
class ReadsBases(Protocol):
    """An adapter that takes chunks from other bases too.

    Attributes:
        bases: which.
    """

    bases: tuple[Base, ...]
