"""Adapters: alter or replace a stored chunk for its context in this prompt, before it is placed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from qcfuse_rag.prompts.segments import Prompt, Span
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.blocks import KINDS, Blocks
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey, hash_ids
from qcfuse_rag.store.prefill_base import Base
from qcfuse_rag.store.quantization import LOSSLESS


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

    @property
    def predecessors(self) -> tuple[str, ...]:
        """Hashes of the token ids of the chunks in front, in order."""
        before = [span for span in self.prompt.chunks if span.stop <= self.span.start]
        return tuple(hash_ids(span.segment.stored_ids) for span in before)

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
        demand: the share of its tokens that ought to be recomputed, for selectors that use it; None if not known.
        note: how it was adapted, in words, for the report.
        key: the entry it came from, which is discarded if it proves damaged; None for the one looked up.
    """

    chunk: ChunkKV
    exact: bool = False
    demand: float | None = None
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


def follows_system_prefix(context: PlacementContext) -> bool:
    """Return whether only the system prefix and chunks stand before a position, as where slots are captured."""
    before = [span.segment.stored_ids for span in context.prompt.chunks if span.stop <= context.span.start]
    return context.prompt.ids[: context.span.start] == tuple(itertools.chain(context.prompt.prefix_ids, *before))


Weighted = tuple[float, ChunkKV]
"""The factor of a difference, and the difference."""


class SummedBlocks(Blocks):
    """Blocks of a cache, in the model's dtype, with differences added when they are read; results are not kept.

    Args:
        chunk: the cache, in any format.
        differences: of the same tokens, unrotated like the cache, in any format.
        first_layer: layers below it stay unchanged.
    """

    def __init__(self, chunk: ChunkKV, differences: Sequence[Weighted], first_layer: int) -> None:
        self._chunk, self._differences, self._first_layer = chunk, differences, first_layer
        self._names = replace(chunk, numbers=LOSSLESS).names()

    def __getitem__(self, name: str) -> Tensor:
        if name.partition(".")[0] not in KINDS:
            return self._chunk.blocks[name]
        return self.rows(name, 0, self._chunk.n_tokens)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of the sum, summed in float32 and rounded once."""
        kind, _, layer = name.partition(".")
        if kind not in KINDS:
            return self._chunk.blocks.rows(name, start, stop)
        block = self._chunk.part(kind, int(layer), start, stop)
        if int(layer) < self._first_layer:
            return block.transpose(0, 1)
        total = block.float()
        for weight, difference in self._differences:
            total = total + weight * difference.part(kind, int(layer), start, stop).to(block.device).float()
        return total.to(block.dtype).transpose(0, 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def add_differences(chunk: ChunkKV, differences: Sequence[Weighted], *, first_layer: int = 0) -> ChunkKV:
    """Return a cache with weighted differences added, layer by layer as it is read.

    Args:
        chunk: the cache.
        differences: of the same tokens and model.
        first_layer: layers below it stay as they are.
    """
    return replace(chunk, numbers=LOSSLESS, blocks=SummedBlocks(chunk, differences, first_layer))
