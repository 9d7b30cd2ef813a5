"""The quota of a store on disk: bytes are reserved before they are written, so that the limit holds at every moment.

A writer first adds a row to the index with the entry's size, evicting other entries until it fits; then it writes the
file; then it turns the row into the entry's. A writer that dies leaves a row with its process; the next writer, or
maintenance, removes that row. The file is there from the reservation on, in its full size, so that reservations are
known from the files alone when the index is lost.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from qcfuse_rag.errors import CorruptEntry, ForeignEntry, StoreError
from qcfuse_rag.store.backends.disk_files import StoreFiles
from qcfuse_rag.store.backends.disk_index import Index
from qcfuse_rag.store.backends.eviction import EntryUsage
from qcfuse_rag.store.backends.index_database import (
    ENTRY,
    INDEX_FAILURES,
    PINNED,
    QUARANTINE,
    WRITING,
    Record,
    is_lost,
)
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.entry.reader import MappedFile, check_key, open_header
from qcfuse_rag.store.regular_file import is_regular

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

WRITE_TIMEOUT_S = 600.0
RESERVE_TIMEOUT_S = 30.0
USES_PER_WRITE = 64
EVICTION_BATCH = 32
UNKNOWN_MS_PER_TOKEN = 1.0
"""Stands for prefill times that were not measured; equal for all, so that use and size alone decide."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reserved bytes of an entry that is being written to the file `temporary`."""

    address: str
    temporary: Path
    size: int


def _again_if_lost(
    change: Callable[Concatenate[DiskQuota, Parameters], Result],
) -> Callable[Concatenate[DiskQuota, Parameters], Result]:
    """Make a change again if the index turns out to be damaged: it is opened again then."""

    @wraps(change)
    def changed(quota: DiskQuota, /, *arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return change(quota, *arguments, **options)
        except INDEX_FAILURES as error:
            if not is_lost(error):
                raise
            return change(quota, *arguments, **options)

    return changed


class DiskQuota:
    """Keeps the files of a store within its limit.

    Args:
        index: of the store.
        files: of the store.
        limit_bytes: most bytes the files may take together.
        worth: eviction policy.
        cipher: opens the headers of encrypted entries.
    """

    def __init__(
        self,
        index: Index,
        files: StoreFiles,
        limit_bytes: int,
        worth: Callable[[EntryUsage], float],
        cipher: StoreCipher | None = None,
    ) -> None:
        self.index, self._files, self._limit, self._worth, self._cipher = index, files, limit_bytes, worth, cipher
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.evicted = 0
        index.on_replaced = self.refill

    @_again_if_lost
    def reserve(self, address: str, size: int) -> Reservation:
        """Reserve bytes, evicting the entries with the least worth.

        Raises:
            StoreError: if it cannot fit: the entry is too large, or too much is pinned or being written.
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
                    self._files.allocate(temporary, size)
                    break
                pinned, writing = self.index.size_of(PINNED), self.index.size_of(WRITING)
            # Bytes that others are writing become evictable once they are written: wait for them, but not for pins.
            if not writing or pinned + size > self._limit or time.monotonic() > deadline:
                part = f", of which {pinned:,} are pinned and {writing:,} being written" if pinned or writing else ""
                raise StoreError(f"a chunk of {size:,} bytes does not fit a store of {self._limit:,} bytes{part}")
            time.sleep(0.01)
        return Reservation(address, temporary, size)

    @_again_if_lost
    def publish(self, reservation: Reservation, numbers: str, saved_ms: float, expires: float | None) -> None:
        """Turn a reservation whose file is written into an entry."""
        usage = EntryUsage(reservation.size, saved_ms, 1.0, time.time())
        with self.index.transact():
            replaced = self.index.get(reservation.address)
            self.index.delete(reservation.temporary.name)
            tag = PINNED if replaced is not None and replaced[2] == PINNED else ENTRY
            self.index.set(reservation.address, Record(usage, numbers, self._worth(usage)), tag, expires)
            # Last: a failure before it undoes the whole transaction.
            self._files.publish(reservation.temporary, reservation.address)

    @_again_if_lost
    def release(self, reservation: Reservation) -> None:
        """Remove a reservation and its file; a file that is published already, but not indexed, is indexed."""
        removed = self._files.remove_temporary(reservation.temporary.name)
        with self.index.transact():
            self.index.delete(reservation.temporary.name)
            if not removed and self._files.status(reservation.address) is not None:
                self._index_published(reservation.address)

    @_again_if_lost
    def rebuild(self) -> int:
        """Fill the index anew, but keep the reservations of living writers; return how many entries it has."""
        with self.index.transact():  # no writer may take the cleared index for free space, even if this process dies
            self.index.clear()
            self.refill()
            return self.index.count(ENTRY)

    def refill(self) -> None:
        """Make the index agree with the files: entries, quarantine, and files being written; then enforce the limit."""
        with self.index.transact():
            # In this order: a file that moves meanwhile is counted twice at worst.
            for path in self._files.temporaries():
                self._index_temporary(path)
            self.reclaim()
            self.index_new_files()
            self.remove_lost()
            self._evict_for(0)

    def remove_lost(self) -> int:
        """Remove the rows whose files are gone; return how many."""
        count = 0
        for name, _, _, tag in list(self.index.rows(ENTRY, PINNED, QUARANTINE)):
            path = self._files.quarantined / name
            with self.index.transact():
                if not (is_regular(path) if tag == QUARANTINE else self._files.status(name)):
                    count += self.index.delete(name)
        return count

    def index_file(self, address: str) -> str | None:
        """Add an entry's file to the index, or quarantine it if its header is damaged; return the damage, or None.

        Raises:
            FileNotFoundError: if there is no such file.
        """
        path = self._files.path(address)
        tokens, numbers, expires = 1, "", None
        try:
            header, _ = open_header(MappedFile(path, header_only=True), self._cipher)
            check_key(header.key, None, address)
            tokens, numbers, expires = header.tokens, header.numbers, header.expires
        except (ForeignEntry, OSError):
            pass  # under another secret, or not readable; but its bytes count
        except CorruptEntry as error:
            self.quarantine(address, str(error))
            return str(error)
        status, row = path.stat(), self.index.get(address)
        usage = EntryUsage(status.st_size, tokens * UNKNOWN_MS_PER_TOKEN, 1.0, status.st_mtime)
        tag = PINNED if row is not None and row[2] == PINNED else ENTRY
        self.index.set(address, Record(usage, numbers, self._worth(usage)), tag, expires)
        return None

    def index_new_files(self) -> tuple[int, list[tuple[str, str]]]:
        """Add every file without a row to the index; return their number, and address and damage of the others."""
        found, damaged = 0, []
        for address, _ in list(self._files.entries()):
            with self.index.transact():
                if (
                    self.index.get(address) is None and self._files.status(address) is not None
                ):  # another process may have evicted it
                    damage = self.index_file(address)
                    if damage is None:
                        found += 1
                    else:
                        damaged.append((address, damage))
        for path in list(self._files.quarantined_entries()):
            with self.index.transact():
                if self.index.get(path.name) is None and path.exists():
                    self._index_quarantined(path, "")
        return found, damaged

    @_again_if_lost
    def pin(self, address: str, *, pinned: bool) -> bool:
        """Exempt an entry from eviction, or undo that; return whether there is such an entry."""
        with self.index.transact():
            row = self.index.get(address)
            if row is not None:
                self.index.set(address, row[0], PINNED if pinned else ENTRY, row[1])
            return row is not None

    @_again_if_lost
    def remove(self, address: str) -> bool:
        """Remove an entry and its copy in quarantine; return whether there was such an entry."""
        with self.index.transact():
            # Files first: a file without a row would still be read.
            quarantined = self._files.path(address).name
            self._files.remove_quarantined(quarantined)
            self.index.delete(quarantined)
            had_file = self._files.remove(address)
            return self.index.delete(address) or had_file

    @_again_if_lost
    def clear_quarantine(self) -> None:
        """Remove all damaged entries."""
        with self.index.transact():
            self._files.clear_quarantine()
            for name, _, _, _ in list(self.index.rows(QUARANTINE)):
                self.index.delete(name)

    @_again_if_lost
    def quarantine(self, address: str, reason: str) -> bool:
        """Move an entry into quarantine, where it stays until its bytes are needed; return whether there was one."""
        with self.index.transact():
            row = self.index.get(address)
            had_row = self.index.delete(address)
            # `get` does not return an expired row: then it expires now.
            expires = row[1] if row is not None else time.time() if had_row else None
            moved = self._files.quarantine(address, reason)
            if moved is not None:
                self._index_quarantined(moved, reason, expires)
            return had_row or moved is not None

    def record_use(self, address: str) -> None:
        """Count a use; it is written to the index later, together with others."""
        with self._lock:
            self._uses[address] += 1
            write_now = self._uses.total() % USES_PER_WRITE == 0
        if write_now:
            self.write_uses(timeout_s=0.0)  # readers do not wait for writers

    def write_uses(self, *, timeout_s: float = RESERVE_TIMEOUT_S) -> None:
        """Write counted uses to the index; if that fails, they are lost at worst."""
        try:
            with self.index.transact(timeout_s=timeout_s):
                self._write_uses()
        except INDEX_FAILURES:
            return

    def reclaim(self) -> int:
        """Remove expired entries and the rows and files of dead writers; return how many bytes were freed."""
        freed, now = 0, time.time()
        for name, record, expires, _ in list(self.index.rows(WRITING)):
            gone = not is_regular(self._files.temporary(name))
            if gone or now > (expires or 0.0) or self._files.is_abandoned(name):
                self.index.delete(name)
                freed += record.usage.size_bytes
                if not self._files.remove_temporary(name):  # the writer may have died before it indexed the file
                    self._index_published(record.about)
        for address, size in self.index.expired(ENTRY, PINNED, now=now):
            self._files.remove(address)
            freed += size if self.index.delete(address) else 0
        for name, size in self.index.expired(QUARANTINE, now=now):
            self._files.remove_quarantined(name)
            freed += size if self.index.delete(name) else 0
        return freed

    def enforce_limit(self) -> None:
        """Evict entries until the limit holds, such as after it was lowered; pinned entries stay."""
        if self.index.size() > self._limit:
            with self.index.transact():
                self._evict_for(0)

    def _index_published(self, address: str) -> None:
        """Add an entry's file to the index; every file without a row if the address is not known."""
        if not address:
            self.index_new_files()
        elif not self._is_indexed(address):
            self.index_file(address)

    def _index_temporary(self, path: Path) -> None:
        """Reserve the bytes of a file that is being written, if nothing is reserved for it."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        if self.index.get(path.name) is None:
            now = time.time()
            row = Record(EntryUsage(status.st_size, 0.0, 1.0, now))
            self.index.set(path.name, row, WRITING, expires=min(now, status.st_mtime) + WRITE_TIMEOUT_S)

    def _is_indexed(self, address: str) -> bool:
        """Return whether an entry's row matches its file, or there is no file."""
        status, row = self._files.status(address), self.index.get(address)
        return status is None or (row is not None and row[0].usage.size_bytes == status.st_size)

    def _index_quarantined(self, path: Path, reason: str, expires: float | None = None) -> None:
        status = path.stat()
        usage = EntryUsage(status.st_size, 0.0, 1.0, status.st_mtime)
        row = Record(usage, worth=status.st_mtime, about=reason)  # the oldest is evicted first
        self.index.set(path.name, row, QUARANTINE, expires)

    def _evict_for(self, size: int) -> bool:
        """Evict until so many bytes are free; return whether that was possible."""
        if size and self.index.size_of(PINNED, WRITING) + size > self._limit:
            return False
        while (excess := self.index.size() + size - self._limit) > 0:
            # The quarantine goes first: nothing there can be used.
            tag = QUARANTINE if self.index.count(QUARANTINE) else ENTRY
            victims = self.index.worst(tag, EVICTION_BATCH)
            if not victims:
                return False
            for name, size_bytes in victims:
                if excess <= 0:
                    break
                if tag == QUARANTINE:
                    self._files.remove_quarantined(name)
                else:
                    self._files.remove(name)
                    self.evicted += 1
                self.index.delete(name)
                excess -= size_bytes
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
