"""A fast store in front of a slow one; a third tier is a tiered store behind another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.backends.base import EntryInfo, Health, KVStore, Miss, StoreStats
from qcfuse_rag.store.backends.write_behind import WriteBehind
from qcfuse_rag.store.chunk import ChunkKV, to_store_format
from qcfuse_rag.store.key import ChunkKey, address_of
from qcfuse_rag.store.quantization import LOSSLESS


class TieredStore(KVStore):
    """Reads through the near store to the far one, and keeps near what was read.

    Whatever tier answers, it answers the same numbers: chunks are converted to the far store's format before either
    keeps them.

    Args:
        near: small and fast, may forget.
        far: the one that counts.
        write_behind_bytes: write to the far store later, holding back at most so many bytes; 0 writes at once. What is
            held back is lost if the process dies, and warmed again by the next job.
        near_suffices: whether a chunk that could be written near alone counts as kept, as on a disk before a remote
            that is away; `flush` tells of it.

    Raises:
        StoreError: if the near store keeps fewer digits than the far one.
    """

    def __init__(
        self, near: KVStore, far: KVStore, *, write_behind_bytes: int = 0, near_suffices: bool = False
    ) -> None:
        if near.numbers not in (LOSSLESS, far.numbers):
            raise StoreError(
                f"the near store keeps {near.numbers} and the far one {far.numbers}, so that answers would depend on "
                "which one was asked; give them the same format"
            )
        self.near, self.far = near, far
        self.numbers = far.numbers
        self.folder = far.folder or near.folder
        self.limit_bytes, self.ttl_s = far.limit_bytes, far.ttl_s
        self._near_suffices, self._unwritten = near_suffices, list[str]()
        self._behind = WriteBehind(far, write_behind_bytes) if write_behind_bytes else None
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qcfuse-prefetch")

    @property
    def tiers(self) -> list[KVStore]:
        """The stores this one is made of, nearest first."""
        return [*self.near.tiers, *self.far.tiers]

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk from the nearest tier; one found only far is copied near, all its blocks checked."""
        found = self.near.get(key)
        if isinstance(found, ChunkKV):
            return found
        return self._bring(key)

    def _bring(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk from the far tier, copied near unless what is expected sooner would have to give way."""
        waiting = self._behind and self._behind.get(key.address)
        found = waiting[1] if waiting else self.far.get(key)
        if isinstance(found, Miss):
            return found
        try:
            if not self.near.admits(key, found):
                return found
            self.near.put(key, found)
        except CorruptEntry as error:
            self.far.discard(key, reason=str(error))
            return Miss(str(error))
        except StoreError:
            return found  # too large for the near tier, or that one is full or read-only: use it from where it is
        except OSError as error:
            return Miss(f"cannot be read: {error}")
        waiting = self._behind and self._behind.get(key.address)
        if not waiting and key not in self.far:  # discarded meanwhile: what is gone must not come back
            self.near.discard(key)
            return found
        promoted = self.near.open(key.address)  # which does not count as another use
        return found if isinstance(promoted, Miss) else promoted[1]

    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        """Return an entry with its key, from the nearest tier that has it; nothing is copied."""
        found = self.near.open(address)
        if not isinstance(found, Miss):
            return found
        return (self._behind and self._behind.get(address)) or self.far.open(address)

    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        """Keep a chunk in both tiers; only the far one must succeed, or either if the near one suffices."""
        converted = to_store_format(chunk, self.numbers).with_ttl(self.ttl_s)
        trouble: StoreError | None = None
        if self._behind is not None:
            self._behind.put(key, converted.copied(), saved_ms)
        else:
            try:
                self.far.put(key, converted, saved_ms=saved_ms)
            except StoreError as error:
                if not self._near_suffices:
                    raise
                trouble = error
        try:
            self.near.put(key, converted, saved_ms=saved_ms)
        except StoreError:
            self.near.discard(key)
            if trouble is not None:
                raise trouble from None
        if trouble is not None:
            self._unwritten.append(str(trouble))

    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        """Remove an entry from both tiers."""
        waiting = self._behind.discard(address_of(key)) if self._behind is not None else False
        far, near = self.far.discard(key, reason), self.near.discard(key, reason)  # far first, see `get`
        return near or far or waiting

    def __contains__(self, key: ChunkKey | str) -> bool:
        waiting = self._behind is not None and self._behind.get(address_of(key)) is not None
        return waiting or key in self.near or key in self.far

    def entries(self) -> Iterator[EntryInfo]:
        """Yield what is known of every entry, as its farthest tier knows it."""
        waiting = self._behind.entries() if self._behind is not None else []
        seen = set()
        for entry in (*self.far.entries(), *self.near.entries(), *(EntryInfo(*one) for one in waiting)):
            if entry.address not in seen:
                seen.add(entry.address)
                yield entry

    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        """Keep an entry from being evicted from either tier, or allow it again."""
        with suppress(StoreError):  # what could not be written is not pinned, and told of at the next flush
            self.flush()
        near, far = self.near.pin(key, pinned=pinned), self.far.pin(key, pinned=pinned)
        return near or far

    def clear(self) -> int:
        """Remove everything from both tiers; return how many entries there were."""
        with suppress(StoreError):
            self.flush()
        count = sum(1 for _ in self.entries())
        self.near.clear()
        self.far.clear()
        return count

    def stats(self) -> list[StoreStats]:
        """Return contents and counters, nearest tier first."""
        return [*self.near.stats(), *self.far.stats()]

    def health(self) -> list[Health]:
        """Try every tier, nearest first."""
        return [*self.near.health(), *self.far.health()]

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        """Copy entries from the far to the near tier on a thread of the store's own."""
        for key in keys:
            if key not in self.near:
                self._reader.submit(self._bring, key)

    def hint(self, keys: Iterable[ChunkKey], *, steps: int = 1) -> None:
        """Keep entries near until they were used, and start bringing there those that are not."""
        wanted = list(keys)
        self.near.hint(wanted, steps=steps)
        for key in wanted:
            if key not in self.near:
                self._reader.submit(self._bring, key)

    def advance(self) -> None:
        """Let a step go by."""
        self.near.advance()

    def evict_removed(self, addresses: Iterable[str]) -> None:
        """Drop from the near tier what the one behind it has no more; a remote is not asked."""
        gone, behind = list(addresses), self.far.tiers[0]
        for address in gone:
            if behind.folder is not None and address not in behind:  # else it was warmed again meanwhile
                self.near.discard(address)
        self.far.evict_removed(gone)

    def flush(self) -> None:
        """Wait until everything put is in the far tier."""
        if self._behind is not None:
            self._behind.flush()
        self.near.flush()
        self.far.flush()
        unwritten, self._unwritten = self._unwritten, []
        if unwritten:
            raise StoreError(f"{len(unwritten)} chunks are in the {self.near.kind} tier only: {unwritten[-1]}")

    def close(self) -> None:
        """Stop prefetching, write what is waiting, and close both tiers.

        Raises:
            StoreError: if something put since the last `flush` could not be written.
        """
        self._reader.shutdown(wait=True, cancel_futures=True)
        try:
            self.flush()
        finally:
            if self._behind is not None:
                self._behind.close()
            self.near.close()
            self.far.close()
