"""Write later: a bounded queue of chunks to be written to a slower store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from qcfuse_rag.background_thread import BackgroundThread
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey


@dataclass(frozen=True, slots=True)
class QueuedChunk:
    """A chunk that is not written yet."""

    key: ChunkKey
    chunk: ChunkKV
    saved_ms: float | None
    size: int


class WriteBehind:
    """Writes chunks on its own thread, in order; `put` waits while the queue is full.

    Args:
        store: to write to.
        limit_bytes: most bytes to queue; one chunk may always be queued, however large.
    """

    def __init__(self, store: KVStore, limit_bytes: int) -> None:
        self._store, self._limit = store, limit_bytes
        self._queued: OrderedDict[str, QueuedChunk] = OrderedDict()
        self._size = 0
        self._writing: str | None = None
        self._errors: list[str] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = BackgroundThread(self._work, name="qcfuse-write-behind", close=self.close)

    def put(self, key: ChunkKey, chunk: ChunkKV, saved_ms: float | None) -> None:
        """Queue a chunk, whose tensors must not change any more."""
        item = QueuedChunk(key, chunk, saved_ms, chunk.nbytes)
        with self._changed:
            self._remove(key.address)
            while self._queued and self._size + item.size > self._limit:
                self._changed.wait()
            self._queued[key.address] = item
            self._size += item.size
            self._changed.notify_all()

    def get(self, address: str) -> tuple[ChunkKey, ChunkKV] | None:
        """Return an entry that is still queued, or None."""
        with self._changed:
            item = self._queued.get(address)
            return None if item is None or item.chunk.expired else (item.key, item.chunk)

    def entries(self) -> list[tuple[str, int]]:
        """Return address and size of queued chunks."""
        with self._changed:
            return [(address, item.size) for address, item in self._queued.items()]

    def discard(self, address: str) -> bool:
        """Remove a chunk from the queue, after waiting for a write of it under way; return whether it was queued."""
        with self._changed:
            removed = self._remove(address)
            while self._writing == address:
                self._changed.wait()
            return removed

    def flush(self) -> None:
        """Wait until the queue is empty.

        Raises:
            StoreError: if a chunk could not be written since the last call.
        """
        with self._changed:
            while self._queued or self._writing:
                self._changed.wait()
            errors, self._errors = self._errors, []
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise StoreError(f"{errors[0]}{more}")

    def close(self) -> None:
        """Write queued chunks and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _remove(self, address: str) -> bool:
        item = self._queued.pop(address, None)
        if item is not None:
            self._size -= item.size
            self._changed.notify_all()
        return item is not None

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queued and not self._closing:
                    self._changed.wait()
                if not self._queued:
                    return
                item = next(iter(self._queued.values()))
                self._writing = item.key.address
            error: str | None = None
            try:
                self._store.put(item.key, item.chunk, saved_ms=item.saved_ms)
            except Exception as failure:  # of any kind: the thread must go on, and `flush` reports it
                error = str(failure)
            with self._changed:
                self._writing = None
                if error is not None:
                    self._errors.append(error)
                if self._queued.get(item.key.address) is item:  # neither discarded nor replaced meanwhile
                    self._remove(item.key.address)
                self._changed.notify_all()
