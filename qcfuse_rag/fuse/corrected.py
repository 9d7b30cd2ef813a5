"""A stored cache with stored differences added to it, one layer at a time, when it is placed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from qcfuse_rag.store.chunk import KINDS, Blocks, ChunkKV
from qcfuse_rag.store.numbers import LOSSLESS

Weighted = tuple[float, ChunkKV]
"""A difference and the factor it is added with."""


class CorrectedBlocks(Blocks):
    """Blocks of a cache, in the model's dtype, with differences added as they are read; nothing is kept.

    Args:
        chunk: the cache, in any format.
        differences: of the same tokens, unrotated like the cache, in any format.
        first_layer: layers below it stay as they are.
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
        own = self._chunk.part(kind, int(layer), start, stop)
        if int(layer) < self._first_layer:
            return own.transpose(0, 1)
        total = own.float()
        for weight, difference in self._differences:
            total = total + weight * difference.part(kind, int(layer), start, stop).to(own.device).float()
        return total.to(own.dtype).transpose(0, 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def corrected(chunk: ChunkKV, differences: Sequence[Weighted], *, first_layer: int = 0) -> ChunkKV:
    """Return a cache with weighted differences added, computed layer by layer as it is read.

    Args:
        chunk: the cache.
        differences: of the same tokens and model.
        first_layer: layers below it stay as they are.
    """
    return replace(chunk, numbers=LOSSLESS, blocks=CorrectedBlocks(chunk, differences, first_layer))
