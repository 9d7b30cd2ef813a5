"""A part of a chunk's tokens as a chunk of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from qcfuse_rag.store.chunk import RANKING, Blocks, ChunkKV


class SlicedBlocks(Blocks):
    """Blocks of some tokens; a store reads and checks no others."""

    def __init__(self, inner: Blocks, start: int, stop: int) -> None:
        self._inner, self._start, self._stop = inner, start, stop

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block, counted from the cut."""
        if self._is_whole(name):
            return self[name][start:stop]
        return self._inner.rows(name, self._start + start, self._start + stop)

    def __getitem__(self, name: str) -> Tensor:
        if name == RANKING:
            ranking = self._inner[name]
            inside = (ranking >= self._start) & (ranking < self._stop)  # as many in every layer
            return (ranking[inside] - self._start).reshape(len(ranking), -1)
        if self._is_whole(name):
            return self._inner[name]
        return self._inner.rows(name, self._start, self._stop)

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    @staticmethod
    def _is_whole(name: str) -> bool:
        """Return whether a block does not lie by tokens: scales of channels, and directions."""
        return name == RANKING or name.endswith(".basis") or (name.startswith("key.") and name.endswith(".scale"))


def slice_chunk(chunk: ChunkKV, start: int, stop: int) -> ChunkKV:
    """Return tokens `start <= t < stop` of a chunk; keys are unrotated, so nothing else changes.

    Raises:
        ValueError: if there are no such tokens.
    """
    if not 0 <= start < stop <= chunk.n_tokens:
        raise ValueError(f"a chunk of {chunk.n_tokens} tokens has none from {start} to {stop}")
    return replace(chunk, n_tokens=stop - start, blocks=SlicedBlocks(chunk.blocks, start, stop))
