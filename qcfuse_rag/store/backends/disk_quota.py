"""Room in a store on disk: bytes are set aside before they are written, so that the limit holds at every moment.

A writer first makes a row in the index that takes the entry's size, evicting others until it fits, then writes, then
turns the row into the entry's. A writer that dies leaves a row behind that names it; whoever next needs room, or looks
after the store, takes it back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qcfuse_rag.errors import CorruptEntry, ForeignEntry, StoreError
from qcfuse_rag.store.backends.disk_files import ENDING, StoreFiles
from qcfuse_rag.store.backends.disk_index import ENTRY, INDEX_FAILURES, PINNED, QUARANTINE, WRITING, Index, Record
from qcfuse_rag.store.backends.eviction import EntryUsage
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.entry.reader import MappedFile, check_key, open_header

WRITE_TIMEOUT_S = 600.0
RESERVE_TIMEOUT_S = 30.0
USES_PER_WRITE = 64
EVICTION_BATCH = 32
UNKNOWN_MS_PER_TOKEN = 1.0
"""Stands for prefill times that nobody has measured; the same for all, so that they rank by use and size alone."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for an entry that is being written to `temporary`."""

    address: str
    temporary: Path
    size: int


class DiskQuota:
    """Keeps the files of a store within its limit.

    Args:
        index: of the store.
        files: of the store.
        limit_bytes: most bytes they may take together.
        worth: eviction policy.
        seal: opens the headers of encrypted entries.
    """

    def __init__(
        self,
        index: Index,
        files: StoreFiles,
        limit_bytes: int,
        worth: Callable[[EntryUsage], float],
        seal: StoreCipher | None = None,
    ) -> None:
        self.index, self._files, self._limit, self._worth, self._seal = index, files, limit_bytes, worth, seal
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.evicted = 0

    def reserve(self, address: str, size: int) -> Reservation:
        """Set bytes aside, evicting what is worth least.

        Raises:
            StoreError: if there can be no room: the entry is too large, or too much is pinned or being written.
        """
        deadline = time.monotonic() + RESERVE_TIMEOUT_S
        while True:
            with self.index.transact():
                self._write_uses()
                self.reclaim()
                if self._evict_for(size):
                    temporary = self._files.new_temporary()
                    row = Record(EntryUsage(size, 0.0, 1.0, time.time()), about=address)
                    self.index.set(temporary.name, row, WRITING, expires=time.time() + WRITE_TIMEOUT_S)
                    return Reservation(address, temporary, size)
                pinned, writing = self.index.size_of(PINNED), self.index.size_of(WRITING)
            if not writing or pinned + size > self._limit or time.monotonic() > deadline:
                taken = f", of which {pinned:,} are pinned and {writing:,} being written" if pinned or writing else ""
                raise StoreError(f"a chunk of {size:,} bytes does not fit a store of {self._limit:,} bytes{taken}")
            time.sleep(0.01)

    def publish(self, reserved: Reservation, numbers: str, saved_ms: float, expires: float | None) -> None:
        """Turn a reservation whose file is written into an entry."""
        usage = EntryUsage(reserved.size, saved_ms, 1.0, time.time())
        with self.index.transact():
            before = self.index.get(reserved.address)
            self.index.delete(reserved.temporary.name)
            tag = PINNED if before is not None and before[2] == PINNED else ENTRY
            self.index.set(reserved.address, Record(usage, numbers, self._worth(usage)), tag, expires)
            self._files.publish(reserved.temporary, reserved.address)  # last: whatever fails before undoes all of it

    def release(self, reserved: Reservation) -> None:
        """Give reserved bytes back."""
        reserved.temporary.unlink(missing_ok=True)
        with self.index.transact():
            self.index.delete(reserved.temporary.name)

    def adopt(self, address: str) -> bool:
        """Index an entry whose file is there, or quarantine it if its header is damaged; return whether it was sound.

        Raises:
            OSError: if the file cannot be read.
        """
        path = self._files.path(address)
        tokens, numbers, expires = 1, "", None
        try:
            header, _ = open_header(MappedFile(path, header_only=True), self._seal)
            check_key(header.key, None, address)
            tokens, numbers, expires = header.tokens, header.numbers, header.expires
        except ForeignEntry:
            pass  # not for us to read; what it takes counts all the same
        except CorruptEntry as error:
            self.quarantine(address, str(error))
            return False
        about, before = path.stat(), self.index.get(address)
        usage = EntryUsage(about.st_size, tokens * UNKNOWN_MS_PER_TOKEN, 1.0, about.st_mtime)
        tag = PINNED if before is not None and before[2] == PINNED else ENTRY
        self.index.set(address, Record(usage, numbers, self._worth(usage)), tag, expires)
        return True

    def adopt_all(self) -> int:
        """Index every entry that has a file and no row; return how many were sound."""
        count = 0
        for address, path in list(self._files.entries()):
            with self.index.transact():
                if self.index.get(address) is None and path.exists():  # others may evict meanwhile
                    count += self.adopt(address)
        for path in list(self._files.quarantined.glob(f"*{ENDING}")):
            with self.index.transact():
                if self.index.get(path.name) is None and path.exists():
                    self._index_quarantined(path, "")
        return count

    def pin(self, address: str, *, pinned: bool) -> bool:
        """Keep an entry from being evicted, or allow it again; return whether there is such an entry."""
        with self.index.transact():
            row = self.index.get(address)
            if row is not None:
                self.index.set(address, row[0], PINNED if pinned else ENTRY, row[1])
            return row is not None

    def remove(self, address: str) -> bool:
        """Remove an entry and what is in quarantine of it; files first: one without a row would still be found."""
        with self.index.transact():
            damaged = self._files.path(address).name
            self._files.remove_quarantined(damaged)
            self.index.delete(damaged)
            found = self._files.remove(address)
            return self.index.delete(address) or found

    def quarantine(self, address: str, reason: str) -> bool:
        """Move an entry into quarantine, where it stays until the room is needed."""
        with self.index.transact():
            row = self.index.get(address)
            found = self.index.delete(address)
            expires = row[1] if row is not None else time.time() if found else None  # what has expired is no row to get
            moved = self._files.quarantine(address, reason)
            if moved is not None:
                self._index_quarantined(moved, reason, expires)
            return found or moved is not None

    def note_use(self, address: str) -> None:
        """Count a use; written to the index later, together with others."""
        with self._lock:
            self._uses[address] += 1
            many = self._uses.total() % USES_PER_WRITE == 0
        if many:
            self.write_uses(patience_s=0.0)  # a reader does not wait for writers

    def write_uses(self, *, patience_s: float = RESERVE_TIMEOUT_S) -> None:
        """Write counted uses to the index; one that cannot be written loses them at worst."""
        try:
            with self.index.transact(patience_s=patience_s):
                self._write_uses()
        except INDEX_FAILURES:
            return

    def reclaim(self) -> int:
        """Remove what has expired and what writers left that are gone; return how many bytes that was."""
        freed, now = 0, time.time()
        for name, record, expires, _ in list(self.index.rows(WRITING)):
            if now > (expires or 0.0) or self._files.is_abandoned(name):
                self.index.delete(name)
                left = self._files.temporary(name)
                freed += record.usage.size_bytes
                if left.exists():
                    left.unlink()
                elif not self._is_indexed(record.about):
                    self.adopt(record.about)  # it was published, and the writer died before it was indexed
        for address, size in self.index.expired(ENTRY, PINNED, now=now):
            self._files.remove(address)
            freed += size if self.index.delete(address) else 0
        for name, size in self.index.expired(QUARANTINE, now=now):
            self._files.remove_quarantined(name)
            freed += size if self.index.delete(name) else 0
        return freed

    def shrink(self) -> None:
        """Evict what is worth least until the limit holds, as after it was lowered; what is pinned stays."""
        if self.index.size() > self._limit:
            with self.index.transact():
                self._evict_for(0)

    def _is_indexed(self, address: str) -> bool:
        """Whether an entry's row is that of its file; also if there is no file."""
        path, row = self._files.path(address), self.index.get(address)
        return not path.exists() or (row is not None and row[0].usage.size_bytes == path.stat().st_size)

    def _index_quarantined(self, path: Path, reason: str, expires: float | None = None) -> None:
        about = path.stat()
        row = Record(EntryUsage(about.st_size, 0.0, 1.0, about.st_mtime), worth=about.st_mtime, about=reason)
        self.index.set(path.name, row, QUARANTINE, expires)

    def _evict_for(self, size: int) -> bool:
        if size and self.index.size_of(PINNED, WRITING) + size > self._limit:
            return False
        while (excess := self.index.size() + size - self._limit) > 0:
            tag = QUARANTINE if self.index.count(QUARANTINE) else ENTRY
            worst = self.index.worst(tag, EVICTION_BATCH)
            if not worst:
                return False
            for name, taken in worst:
                if excess <= 0:
                    break
                if tag == QUARANTINE:
                    self._files.remove_quarantined(name)
                else:
                    self._files.remove(name)
                    self.evicted += 1
                self.index.delete(name)
                excess -= taken
        return True

    def _write_uses(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, Counter()
        now = time.time()
        for address, count in uses.items():
            row = self.index.get(address)
            if row is not None:
                record, expires, tag = row
                self.index.set(address, record.after_uses(now, count, self._worth), tag, expires)
