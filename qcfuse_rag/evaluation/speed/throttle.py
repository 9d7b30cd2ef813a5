"""A store in memory that reads no faster than a given disk or network would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.store.chunk import Blocks, ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.quantization import LOSSLESS


class ThrottledBlocks(Blocks):
    """Blocks that take as long to read as they would at some bytes a second."""

    def __init__(self, inner: Blocks, bytes_per_s: float) -> None:
        self._inner, self._bytes_per_s = inner, bytes_per_s

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block, late."""
        return self._late(self._inner.rows(name, start, stop))

    def __getitem__(self, name: str) -> Tensor:
        return self._late(self._inner[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def _late(self, tensor: Tensor) -> Tensor:
        time.sleep(tensor.nbytes / self._bytes_per_s)
        return tensor


class ThrottledStore(MemoryStore):
    """Keeps chunks in memory and hands them out slowly.

    Args:
        bytes_per_s: how fast at most.
        limit_bytes: most bytes to hold.
        numbers: format to keep, see `store.quantization`.
    """

    def __init__(self, bytes_per_s: float, limit_bytes: int = 1 << 50, *, numbers: str = LOSSLESS) -> None:
        super().__init__(limit_bytes, numbers=numbers)
        self._bytes_per_s = bytes_per_s

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return a chunk whose blocks come late, or a miss."""
        return self._slow(super().get(key))

    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        """Return an entry whose blocks come late, or a miss."""
        found = super().open(address)
        if isinstance(found, Miss):
            return found
        slow = self._slow(found[1])
        assert isinstance(slow, ChunkKV)
        return found[0], slow

    def _slow(self, found: ChunkKV | Miss) -> ChunkKV | Miss:
        return (
            found
            if isinstance(found, Miss)
            else replace(found, blocks=ThrottledBlocks(found.blocks, self._bytes_per_s))
        )
