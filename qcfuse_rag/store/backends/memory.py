"""A store in memory, the host's or a GPU's, bounded in bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import EntryInfo, Health, KVStore, Miss, StoreStats
from qcfuse_rag.store.backends.eviction import EntryUsage, eviction_policy
from qcfuse_rag.store.backends.hints import EXPECTED, Hints
from qcfuse_rag.store.chunk import ChunkKV, to_store_format
from qcfuse_rag.store.key import ChunkKey, address_of
from qcfuse_rag.store.quantization import LOSSLESS, check_numbers


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
        limit_bytes: most bytes to hold.
        device: whose memory: `cpu`, or a GPU such as `cuda:0` for chunks asked for all the time.
        pinned: page-lock host memory, from which a GPU reads fastest; needs CUDA.
        numbers: format to keep, see `store.quantization`.
        eviction: `lru`, `lfu` or `cost`, see `store.backends.eviction`.
        ttl_s: seconds after which a chunk that has no expiry of its own is gone, or None.

    Raises:
        ValueError: if there is no such format or policy.
    """

    def __init__(
        self,
        limit_bytes: int = 2 << 30,
        *,
        device: str = "cpu",
        pinned: bool = False,
        numbers: str = LOSSLESS,
        eviction: str = "lru",
        ttl_s: float | None = None,
    ) -> None:
        check_numbers(numbers)
        self.kind = "memory" if torch.device(device).type == "cpu" else device
        self.numbers = numbers
        self.limit_bytes, self._limit, self.ttl_s = limit_bytes, limit_bytes, ttl_s
        self._device, self._pinned = torch.device(device), pinned
        self._worth = eviction_policy(eviction)
        self._entries: dict[str, MemoryEntry] = {}
        self._hints = Hints()
        self._size = self._hits = self._misses = self._evicted = self._discarded = 0
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk or a miss."""
        with self._lock:
            self._hints.used(key.address)
            held = self._entries.get(key.address)
            if held is None or held.chunk.expired:
                self._misses += 1
                return Miss("expired" if self._remove(key.address) else "absent")
            self._hits += 1
            held.usage = held.usage.after_uses(time.time())
            return held.chunk

    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        """Return an entry with its key."""
        with self._lock:
            held = self._entries.get(address)
            if held is None or held.chunk.expired:
                return Miss("absent" if held is None else "expired")
            return held.key, held.chunk

    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        """Keep a copy of the chunk."""
        lasting = chunk.with_ttl(self.ttl_s)
        copied = to_store_format(lasting, self.numbers).copied(self._device, pinned=self._pinned)
        size = copied.nbytes
        usage = EntryUsage(size, float(chunk.n_tokens) if saved_ms is None else saved_ms, 1.0, time.time())
        with self._lock:
            pinned = key.address in self._entries and self._entries[key.address].pinned
            kept = sum(h.usage.size_bytes for a, h in self._entries.items() if h.pinned and a != key.address)
            if kept + size > self._limit:
                raise StoreError(
                    f"a chunk of {size:,} bytes does not fit a {self.kind} store of {self._limit:,} bytes"
                    + (f", of which {kept:,} are pinned" if kept else "")
                )
            self._remove(key.address)
            while self._size + size > self._limit:
                free = (address for address, held in self._entries.items() if not held.pinned)
                self._remove(min(free, key=self._rank))
                self._evicted += 1
            self._entries[key.address] = MemoryEntry(key, copied, usage, pinned)
            self._size += size

    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        """Remove an entry."""
        with self._lock:
            found = self._remove(address_of(key))
            self._discarded += found and reason is not None
            return found

    def __contains__(self, key: ChunkKey | str) -> bool:
        with self._lock:
            held = self._entries.get(address_of(key))
            return held is not None and not held.chunk.expired

    def entries(self) -> Iterator[EntryInfo]:
        """Yield what is known of every entry."""
        with self._lock:
            held = list(self._entries.items())
        for address, one in held:
            u = one.usage
            about = (u.size_bytes, one.chunk.numbers, u.uses, u.used, u.saved_ms, one.chunk.expires)
            yield EntryInfo(address, *about, pinned=one.pinned)

    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        """Keep an entry from being evicted, or allow it again."""
        with self._lock:
            held = self._entries.get(address_of(key))
            if held is not None:
                held.pinned = pinned
            return held is not None

    def hint(self, keys: Iterable[ChunkKey], *, steps: int = 1) -> None:
        """Keep entries before others until they were used; see `store.backends.hints`. They may be on their way here."""
        self._hints.add([key.address for key in keys], steps)

    def advance(self) -> None:
        """Let a step go by."""
        self._hints.advance()

    def admits(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Return whether there is room for a chunk beside those expected as soon or sooner, and pinned ones."""
        if not self._hints:
            return True
        size, urgency = chunk.nbytes, max(self._hints.urgency(key.address), EXPECTED)
        with self._lock:
            firm = (h for a, h in self._entries.items() if h.pinned or self._hints.urgency(a) >= urgency)
            return sum(held.usage.size_bytes for held in firm) + size <= self._limit

    def stats(self) -> list[StoreStats]:
        """Return contents and counters."""
        with self._lock:
            counts = (self._hits, self._misses, self._evicted, self._discarded)
            return [StoreStats(self.kind, len(self._entries), self._size, self._limit, *counts)]

    def health(self) -> list[Health]:
        """Memory that this process has works."""
        return [Health(self.kind, ok=True)]

    def _rank(self, address: str) -> tuple[float, float]:
        """Return what eviction goes by, the smallest first: what is expected, then what was."""
        return self._hints.urgency(address), self._worth(self._entries[address].usage)

    def _remove(self, address: str) -> bool:
        if address not in self._entries:
            return False
        self._size -= self._entries.pop(address).usage.size_bytes
        return True
