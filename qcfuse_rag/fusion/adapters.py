"""Adapters: alter or replace a stored chunk for its context in this prompt, before it is placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qcfuse_rag.prompts.segments import Prompt, Span
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import Base


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """The position of a chunk in a prompt, for adapters.

    Attributes:
        lm: the model.
        store: the store of chunks.
        prompt: the prompt.
        span: the chunk's positions in it.
        base: the base under which the chunk was looked up.
    """

    lm: LanguageModel
    store: KVStore
    prompt: Prompt
    span: Span
    base: Base

    def key(self, base: Base) -> ChunkKey:
        """Return the chunk's address under a base."""
        return base.key(self.lm.fingerprint, self.prompt.prefix_ids, self.span.segment.stored_ids)

    def exact_under(self, base: Base) -> bool:
        """Return whether the chunk under a base equals what full prefill would compute at this position."""
        return base.exact_at(self.span.start, self.prompt.ids, self.prompt.prefix_ids)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedChunk:
    """A chunk to place.

    Attributes:
        chunk: keys and values.
        exact: whether a full prefill of this prompt would give the same.
        note: how it was adapted, in words, for the report.
        key: the entry it came from, which is discarded if it proves damaged; None for the one looked up.
    """

    chunk: ChunkKV
    exact: bool = False
    note: str | None = None
    key: ChunkKey | None = None


class Adapter(Protocol):
    """Chooses or alters the chunk to place at a position in a prompt."""

    def adapt(self, context: PlacementContext, stored: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Return the chunk to place.

        Args:
            context: the chunk's position in the prompt.
            stored: the chunk as it was looked up, or why the store has none.

        Returns:
            The chunk to place, or the reason to compute it in full.
        """
        ...
