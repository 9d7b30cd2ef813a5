"""A store in the memory of the host or a GPU, limited in bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import EntryInfo, EntryUsage, Health, KVStore, Miss, StoreStats, eviction_policy
from qcfuse_rag.store.chunk import ChunkKV, to_store_format
from qcfuse_rag.store.key import ChunkKey, address_of
from qcfuse_rag.store.quantization import LOSSLESS, check_kv_dtype

LOG = logging.getLogger(__name__)
UNLIMITED = 1 << 50
"""A limit in bytes that no machine reaches."""


@dataclass(slots=True)
class MemoryEntry:
    """An entry in memory."""

    key: ChunkKey
    chunk: ChunkKV
    usage: EntryUsage
    pinned: bool = False


class MemoryStore(KVStore):
    """Keeps chunks as tensors in this process.

    Args:
        limit_bytes: most bytes it may take.
        device: `cpu`, or a GPU such as `cuda:0` for chunks that are used all the time.
        pinned: page-lock host memory, from which a GPU reads fastest; needs CUDA. None leaves it to the engine, which
            does so if its model is on a GPU. Torch rounds such memory up to powers of two.
        kv_dtype, ttl_s: see `KVStore`.
        eviction: `lru`, `lfu` or `cost`, see `store.backends.base`.

    Raises:
        ValueError: if there is no such format or policy.
    """

    def __init__(
        self,
        limit_bytes: int = 2 << 30,
        *,
        device: str = "cpu",
        pinned: bool | None = None,
        kv_dtype: str = LOSSLESS,
        eviction: str = "lru",
        ttl_s: float | None = None,
    ) -> None:
        check_kv_dtype(kv_dtype)
        self.kind = "memory" if torch.device(device).type == "cpu" else device
        self.kv_dtype = kv_dtype
        self.limit_bytes: int = limit_bytes
        self.ttl_s = ttl_s
        self._device, self._pinned = torch.device(device), pinned
        self._worth = eviction_policy(eviction)
        self._entries: dict[str, MemoryEntry] = {}
        self._size = self._hits = self._misses = self._evicted = self._discarded = 0
        self._lock = threading.Lock()

    def page_lock(self) -> None:
        """Page-lock the host memory of entries from now on, unless the store was told whether to."""
        if self._pinned is None and self._device.type == "cpu":
            self._pinned = True

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        with self._lock:
            entry = self._entries.get(key.address)
            if entry is None or entry.chunk.expired:
                self._misses += 1
                return Miss("expired" if self._remove(key.address) else "absent")
            self._hits += 1
            entry.usage = entry.usage.after_uses(time.time())
            return entry.chunk

    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        with self._lock:
            entry = self._entries.get(address)
            if entry is None or entry.chunk.expired:
                return Miss("absent" if entry is None else "expired")
            return entry.key, entry.chunk

    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        copied = self.copy_of(to_store_format(chunk.with_ttl(self.ttl_s), self.kv_dtype))
        size = copied.nbytes
        usage = EntryUsage(size, float(chunk.n_tokens) if saved_ms is None else saved_ms, 1.0, time.time())
        with self._lock:
            pinned = key.address in self._entries and self._entries[key.address].pinned
            others = (entry for address, entry in self._entries.items() if address != key.address)
            pinned_bytes = sum(entry.usage.size_bytes for entry in others if entry.pinned)
            if pinned_bytes + size > self.limit_bytes:
                raise StoreError(
                    f"a chunk of {size:,} bytes does not fit a {self.kind} store of {self.limit_bytes:,} bytes"
                    + (f", of which {pinned_bytes:,} are pinned" if pinned_bytes else "")
                )
            self._remove(key.address)
            while self._size + size > self.limit_bytes:
                evictable = (address for address, entry in self._entries.items() if not entry.pinned)
                self._remove(min(evictable, key=lambda address: self._worth(self._entries[address].usage)))
                self._evicted += 1
            self._entries[key.address] = MemoryEntry(key, copied, usage, pinned)
            self._size += size

    def copy_of(self, chunk: ChunkKV) -> ChunkKV:
        """Copy a chunk to where this store keeps it; into ordinary memory if no more can be page-locked."""
        if self._pinned:
            try:
                return chunk.copied(self._device, pinned=True)
            except RuntimeError as error:
                LOG.warning("entries are kept in ordinary memory, which a GPU reads more slowly: %s", error)
                self._pinned = False
        return chunk.copied(self._device)

    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        with self._lock:
            removed = self._remove(address_of(key))
            self._discarded += removed and reason is not None
            return removed

    def __contains__(self, key: ChunkKey | str) -> bool:
        with self._lock:
            entry = self._entries.get(address_of(key))
            return entry is not None and not entry.chunk.expired

    def entries(self) -> Iterator[EntryInfo]:
        with self._lock:
            entries = list(self._entries.items())
        for address, entry in entries:
            chunk, pinned = entry.chunk, entry.pinned
            yield EntryInfo(
                address, **asdict(entry.usage), kv_dtype=chunk.kv_dtype, expires=chunk.expires, pinned=pinned
            )

    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        with self._lock:
            entry = self._entries.get(address_of(key))
            if entry is not None:
                entry.pinned = pinned
            return entry is not None

    def stats(self) -> list[StoreStats]:
        with self._lock:
            counts = (self._hits, self._misses, self._evicted, self._discarded)
            return [StoreStats(self.kind, len(self._entries), self._size, self.limit_bytes, *counts)]

    def health(self) -> list[Health]:
        return [Health(self.kind, ok=True)]

    def _remove(self, address: str) -> bool:
        if address not in self._entries:
            return False
        self._size -= self._entries.pop(address).usage.size_bytes
        return True
