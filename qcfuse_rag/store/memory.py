"""A store in host memory, bounded in bytes, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore, Miss, StoreStats
from qcfuse_rag.store.key import ChunkKey


class MemoryStore(KVStore):
    """Keeps chunks as tensors in this process.

    Args:
        limit_bytes: most bytes to hold.
    """

    def __init__(self, limit_bytes: int = 2 << 30) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[str, tuple[ChunkKV, int]] = OrderedDict()
        self._size = self._hits = self._misses = self._discarded = 0
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk or a miss."""
        with self._lock:
            if key.address not in self._entries:
                self._misses += 1
                return Miss("absent")
            self._hits += 1
            self._entries.move_to_end(key.address)
            return self._entries[key.address][0]

    def put(self, key: ChunkKey, chunk: ChunkKV) -> None:
        """Keep a copy of the chunk in host memory."""
        size = chunk.nbytes
        if size > self._limit:
            raise StoreError(f"a chunk of {size:,} bytes does not fit a memory store of {self._limit:,} bytes")
        copied = ChunkKV(
            chunk.n_tokens, chunk.n_layers, {n: chunk.blocks[n].to("cpu", copy=True) for n in chunk.names()}
        )
        with self._lock:
            self._remove(key.address)
            while self._size + size > self._limit:
                self._remove(next(iter(self._entries)))
            self._entries[key.address] = (copied, size)
            self._size += size

    def discard(self, key: ChunkKey, reason: str | None = None) -> bool:
        """Remove an entry."""
        with self._lock:
            found = self._remove(key.address)
            self._discarded += found and reason is not None
            return found

    def __contains__(self, key: ChunkKey) -> bool:
        with self._lock:
            return key.address in self._entries

    def clear(self) -> int:
        """Remove everything."""
        with self._lock:
            count = len(self._entries)
            self._entries.clear()
            self._size = 0
            return count

    def stats(self) -> list[StoreStats]:
        """Return contents and counters."""
        with self._lock:
            return [
                StoreStats(
                    "memory", len(self._entries), self._size, self._limit, self._hits, self._misses, self._discarded
                )
            ]

    def _remove(self, address: str) -> bool:
        if address not in self._entries:
            return False
        self._size -= self._entries.pop(address)[1]
        return True
