"""Slice a chunk: some of its tokens as a chunk of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from qcfuse_rag.store.chunk import RANKING, Blocks, ChunkKV


class SlicedBlocks(Blocks):
    """Blocks of some of a chunk's tokens; a store reads and checks no others."""

    def __init__(self, blocks: Blocks, start: int, stop: int) -> None:
        self._blocks, self._start, self._stop = blocks, start, stop

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block, counted from the beginning of the slice."""
        if self._is_shared(name):
            return self[name][start:stop]
        return self._blocks.rows(name, self._start + start, self._start + stop)

    def __getitem__(self, name: str) -> Tensor:
        if name == RANKING:
            ranking = self._blocks[name]
            inside = (ranking >= self._start) & (ranking < self._stop)  # equally many in every layer
            return (ranking[inside] - self._start).reshape(len(ranking), -1)
        if self._is_shared(name):
            return self._blocks[name]
        return self._blocks.rows(name, self._start, self._stop)

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @staticmethod
    def _is_shared(name: str) -> bool:
        """Return whether a block's first dimension is not tokens: the ranking, scales of channels, and bases."""
        return name == RANKING or name.endswith(".basis") or (name.startswith("key.") and name.endswith(".scale"))


def slice_chunk(chunk: ChunkKV, start: int, stop: int) -> ChunkKV:
    """Return tokens `start <= t < stop` of a chunk; keys are unrotated, so nothing else changes.

    Raises:
        ValueError: if the chunk does not have these tokens.
    """
    if not 0 <= start < stop <= chunk.n_tokens:
        raise ValueError(f"a chunk of {chunk.n_tokens} tokens has none from {start} to {stop}")
    return replace(chunk, n_tokens=stop - start, blocks=SlicedBlocks(chunk.blocks, start, stop))
