"""A fast store in front of a slow one; a third tier is a tiered store behind another."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.backends.base import EntryInfo, Health, KVStore, Miss, StoreStats
from qcfuse_rag.store.chunk import ChunkKV, to_store_format
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.quantization import LOSSLESS


class TieredStore(KVStore):
    """Reads from the near store, else from the far one, and copies to the near store what was read.

    Both tiers return the same numbers: chunks are converted to the far store's format before either stores them.

    Args:
        near: small and fast; it may evict.
        far: the store whose success counts.
        near_suffices: count a chunk as stored if only the near store could be written, such as a disk in front of a
            remote that cannot be reached; `flush` reports it.

    Raises:
        StoreError: if the near store has less precision than the far one.
    """

    def __init__(self, near: KVStore, far: KVStore, *, near_suffices: bool = False) -> None:
        if near.kv_dtype not in (LOSSLESS, far.kv_dtype):
            raise StoreError(
                f"the near store keeps {near.kv_dtype} and the far one {far.kv_dtype}, so that answers would depend on "
                "which one was asked; give them the same format"
            )
        self.near, self.far = near, far
        self.kv_dtype = far.kv_dtype
        self.folder = far.folder or near.folder
        self.limit_bytes, self.ttl_s = far.limit_bytes, far.ttl_s
        self._near_suffices, self._far_failures = near_suffices, list[str]()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qcfuse-prefetch")
        self._prefetching: set[str] = set()
        self._lock = threading.Lock()

    @property
    def tiers(self) -> list[KVStore]:
        return [*self.near.tiers, *self.far.tiers]

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk from the nearest tier; from the far tier it is copied near, with all its blocks checked."""
        chunk = self.near.get(key)
        if not isinstance(chunk, ChunkKV):
            return self._promote(key)
        for tier in self.far.tiers:
            tier.note_use(key.address)
        return chunk

    def _promote(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk from the far tier, and copy it near."""
        chunk = self.far.get(key)
        if isinstance(chunk, Miss):
            return chunk
        try:
            self.near.put(key, chunk)  # reads and checks every block
        except CorruptEntry as error:
            self.far.discard(key, reason=str(error))
            return Miss(str(error))
        except StoreError:
            return chunk  # too large for the near tier, or it is full or read-only: read from the far tier
        except OSError as error:
            return Miss(f"cannot be read: {error}")
        if key not in self.far:  # discarded meanwhile
            self.near.discard(key)
            return chunk
        promoted = self.near.open(key.address)  # does not count as another use
        return chunk if isinstance(promoted, Miss) else promoted[1]

    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        """Return an entry with its key, from the nearest tier that has it; nothing is copied."""
        opened = self.near.open(address)
        return self.far.open(address) if isinstance(opened, Miss) else opened

    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        """Store a chunk in both tiers; only the far one must succeed, or either if the near one suffices."""
        converted = to_store_format(chunk, self.kv_dtype).with_ttl(self.ttl_s)
        failure: StoreError | None = None
        try:
            self.far.put(key, converted, saved_ms=saved_ms)
        except StoreError as error:
            if not self._near_suffices:
                raise
            failure = error
        try:
            self.near.put(key, converted, saved_ms=saved_ms)
        except StoreError:
            self.near.discard(key)
            if failure is not None:
                raise failure from None
        if failure is not None:
            self._far_failures.append(str(failure))

    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        # The far tier first: a promotion under way looks there before it keeps its copy.
        far, near = self.far.discard(key, reason), self.near.discard(key, reason)
        return near or far

    def __contains__(self, key: ChunkKey | str) -> bool:
        return key in self.near or key in self.far

    def entries(self) -> Iterator[EntryInfo]:
        """Yield what the farthest tier knows of every entry, and what only a nearer tier knows, such as its uses."""
        known = {entry.address: entry for entry in self.far.entries()}
        for entry in self.near.entries():
            far = known.get(entry.address)
            known[entry.address] = entry if far is None else far.completed_by(entry)
        yield from known.values()

    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        near, far = self.near.pin(key, pinned=pinned), self.far.pin(key, pinned=pinned)
        return near or far

    def clear(self) -> int:
        count = sum(1 for _ in self.entries())
        self.near.clear()
        self.far.clear()
        return count

    def stats(self) -> list[StoreStats]:
        return [*self.near.stats(), *self.far.stats()]

    def health(self) -> list[Health]:
        return [*self.near.health(), *self.far.health()]

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        """Copy entries from the far to the near tier on the store's own thread; each only once at a time."""
        for key in keys:
            if key in self.near:
                self.near.prefetch([key])
                continue
            with self._lock:
                if key.address in self._prefetching:
                    continue
                self._prefetching.add(key.address)
            self._reader.submit(self._prefetch, key)

    def _prefetch(self, key: ChunkKey) -> None:
        try:
            if key not in self.near:
                self._promote(key)
        finally:
            with self._lock:
                self._prefetching.discard(key.address)

    def flush(self) -> None:
        self.near.flush()
        self.far.flush()
        failures, self._far_failures = self._far_failures, []
        if failures:
            copy = "; copy them later with `qcfuse store move --keep --to URL`" if self.near.folder is not None else ""
            raise StoreError(f"{len(failures)} chunks are in the {self.near.kind} tier only: {failures[-1]}{copy}")

    def close(self) -> None:
        """Stop prefetching and close both tiers."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        try:
            self.flush()
        finally:
            self.near.close()
            self.far.close()
