"""A fast store in front of a large one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore, Miss, StoreStats
from qcfuse_rag.store.key import ChunkKey


class TieredStore(KVStore):
    """Reads through the near store to the far one, and keeps near what was read.

    Args:
        near: small and fast, may forget.
        far: the one that counts.
    """

    def __init__(self, near: KVStore, far: KVStore) -> None:
        self.near, self.far = near, far
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qcfuse-prefetch")

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk from the nearest tier; one found only far is copied near, all its blocks checked."""
        found = self.near.get(key)
        if isinstance(found, ChunkKV):
            return found
        found = self.far.get(key)
        if isinstance(found, Miss):
            return found
        try:
            self.near.put(key, found)
        except CorruptEntry as error:
            self.far.discard(key, reason=str(error))
            return Miss(str(error))
        except StoreError:
            return found  # too large for the near tier: use it from where it is
        promoted = self.near.get(key)
        return promoted if isinstance(promoted, ChunkKV) else found

    def put(self, key: ChunkKey, chunk: ChunkKV) -> None:
        """Keep a chunk in both tiers; only the far one must succeed."""
        self.far.put(key, chunk)
        try:
            self.near.put(key, chunk)
        except StoreError:
            self.near.discard(key)

    def discard(self, key: ChunkKey, reason: str | None = None) -> bool:
        """Remove an entry from both tiers."""
        near, far = self.near.discard(key, reason), self.far.discard(key, reason)
        return near or far

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.near or key in self.far

    def clear(self) -> int:
        """Remove everything from both tiers; return how many entries the far one had."""
        self.near.clear()
        return self.far.clear()

    def stats(self) -> list[StoreStats]:
        """Return contents and counters, near tier first."""
        return [*self.near.stats(), *self.far.stats()]

    def prefetch(self, keys: list[ChunkKey]) -> None:
        """Copy entries from the far to the near tier on a thread of the store's own."""
        for key in keys:
            if key not in self.near:
                self._reader.submit(self.get, key)

    def close(self) -> None:
        """Stop prefetching and close both tiers."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self.near.close()
        self.far.close()
