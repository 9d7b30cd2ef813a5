"""The index of a store on disk, and the quota that it keeps: size, worth, pin and expiry of every file.

It is a diskcache: a table in SQLite with sizes, expiry and tags, safe between threads and processes. By itself,
diskcache pickles unknown values and unpickles what it finds (CVE-2025-69872). `TextDisk` prevents both: keys and values
are text, anything else is an error and is never executed. The index is never needed to read an entry, and is rebuilt
from the files when it is missing or damaged.

Bytes are reserved before they are written, so that the limit holds at every moment. A writer first adds a row with the
entry's size, evicting other entries until it fits; then it writes the file; then it turns the row into the entry's. A
writer that dies leaves a row with its process; the next writer, or maintenance, removes that row. The file is there
from the reservation on, in its full size, so that reservations are known from the files alone when the index is lost.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import diskcache
from diskcache.core import MODE_RAW, UNKNOWN

from qcfuse_rag.errors import CorruptEntry, ForeignEntry, StoreError
from qcfuse_rag.store.backends.base import EntryUsage
from qcfuse_rag.store.backends.files import StoreFiles, file_size
from qcfuse_rag.store.entry.codec import PARSE_ERRORS, MappedFile, check_key, open_chunk
from qcfuse_rag.store.entry.encryption import StoreCipher

ENTRY, PINNED, WRITING, QUARANTINE = "entry", "pinned", "writing", "quarantine"
"""Tags of rows: an entry, a pinned entry, a reservation of a file being written, a file in quarantine."""

INDEX_FAILURES = (sqlite3.Error, diskcache.Timeout, CorruptEntry, OSError)
DAMAGE_MESSAGES = ("malformed", "not a database", "no such table")
"""Parts of SQLite's messages that say that a database is damaged."""

BUSY_TIMEOUT_S = 60.0
WRITE_TIMEOUT_S = 600.0
RESERVE_TIMEOUT_S = 30.0
USES_PER_WRITE = 64
EVICTION_BATCH = 32
UNKNOWN_MS_PER_TOKEN = 1.0
"""Stands for prefill times that were not measured; equal for all, so that use and size alone decide."""


class IndexReplaced(CorruptEntry):
    """The file of an open index was removed or replaced; opening the index again helps."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row of the index."""

    usage: EntryUsage  # size and uses; of a file that is being written, the reserved size
    kv_dtype: str = ""
    worth: float = 0.0  # rank among entries; the smallest is evicted first
    about: str = ""  # of a file that is being written, its address; of a file in quarantine, the damage

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the JSON text that the index holds; raises `CorruptEntry` if it is not a record."""
        try:
            data = json.loads(text)
            record = cls(EntryUsage(**data.pop("usage")), data.pop("numbers"), **data)
            usage = record.usage
            if usage.size_bytes < 0 or not all(map(math.isfinite, (usage.uses, usage.used, record.worth))):
                raise ValueError("a number is out of range")
        except PARSE_ERRORS as error:
            raise CorruptEntry(f"the index holds a record that makes no sense: {str(error)[:100]}") from error
        return record


class LiteralPath(str):
    """An absolute path that diskcache takes as it is; in others it replaces the names of environment variables."""

    def __str__(self) -> str:
        return self

    def __contains__(self, part: object) -> bool:  # by "$" `os.path.expandvars` knows that there is a name to replace
        return part != "$" and isinstance(part, str) and super().__contains__(part)


class TextDisk(diskcache.Disk):  # type: ignore[misc]
    """Serialisation for diskcache with text as keys and records as values, and nothing else."""

    def put(self, key: Any) -> tuple[str, bool]:
        if not isinstance(key, str):
            raise TypeError(f"keys are strings, got {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: bool) -> str:
        if not raw or not isinstance(key, str):
            raise CorruptEntry("the index holds a key that is not text; it was not written by this library")
        return key

    def store(self, value: Any, read: bool, key: Any = UNKNOWN) -> tuple[int, int, None, str]:
        if not isinstance(value, Record) or read:
            raise TypeError(f"values are records, got {type(value).__name__}")
        fields = asdict(value)
        fields["numbers"] = fields.pop("kv_dtype")  # its name in the index
        return value.usage.size_bytes, MODE_RAW, None, json.dumps(fields)

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Record:
        if mode != MODE_RAW or filename is not None or not isinstance(value, str) or read:
            raise CorruptEntry("the index holds a value that is not text; it was not read")
        return Record.from_json(value)

    def remove(self, file_path: str) -> None:
        """Remove no file: rows have none, and a foreign row may name any."""


class Index:
    """Rows by name; the name of an entry's row is its address. Errors are `INDEX_FAILURES`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._path = folder / "cache.db"
        # Created for its owner only. Never opened once it exists: closing it would drop SQLite's locks.
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # diskcache itself must not evict: its limit holds only afterwards. Nothing is mapped into memory: a disk error
        # there is a signal that ends the process.
        options = {"eviction_policy": "none", "cull_limit": 0, "sqlite_mmap_size": 0, "sqlite_secure_delete": 1}
        self._opened = diskcache.Cache(LiteralPath(folder.absolute()), disk=TextDisk, **options)
        self.file_number = inode(folder)
        if (damage := self._rows("PRAGMA quick_check(1)")[0][0]) != "ok":
            raise CorruptEntry(damage)
        # In one statement: another process may add a row between two.
        ((kept, sum_of_rows),) = self._rows(
            "SELECT (SELECT value FROM Settings WHERE key = 'size'), (SELECT COALESCE(SUM(size), 0) FROM Cache)"
        )
        if kept != sum_of_rows:
            raise CorruptEntry("the index holds a wrong sum of bytes")
        # diskcache has no order by worth; the table and `_sql` are those of its last release, 5.6.3.
        self._rows("CREATE INDEX IF NOT EXISTS Cache_worth ON Cache (tag, json_extract(value, '$.worth'))")

    @contextmanager
    def transact(self, *, timeout_s: float = BUSY_TIMEOUT_S) -> Iterator[None]:
        """Lock the index against all other writers, and commit or roll back all changes together."""
        try:
            self._rows(f"PRAGMA busy_timeout = {round(1000 * timeout_s)}")
            with self._cache.transact():
                yield
        except diskcache.Timeout as error:  # raised for every failure to begin; raise its cause
            raise error.__context__ or error from None

    def size(self) -> int:
        sizes = self._rows("SELECT value FROM Settings WHERE key = 'size'")
        if len(sizes) != 1 or type(sizes[0][0]) is not int:
            raise CorruptEntry("the index holds no sum of bytes")
        return int(sizes[0][0])

    def get(self, name: str) -> tuple[Record, float | None, str] | None:
        """Return a row with its expiry and tag, or None if there is none or it has expired."""
        record, expires, tag = self._cache.get(name, expire_time=True, tag=True)
        return None if record is None else (record, expires, tag)

    def set(self, name: str, record: Record, tag: str, expires: float | None = None) -> None:
        expires_in = None if expires is None else expires - time.time()
        self._cache.set(name, record, expire=expires_in, tag=tag)

    def delete(self, name: str) -> bool:
        """Remove a row; return whether there was one."""
        return bool(self._cache._sql("DELETE FROM Cache WHERE key = ? AND raw = 1", (name,)).rowcount)

    def expired(self, *tags: str, now: float) -> list[str]:
        """Return the names of expired rows with these tags."""
        statement = "SELECT key FROM Cache WHERE tag = ? AND expire_time < ?"
        return [name for tag in tags for (name,) in self._rows(statement, tag, now)]

    def worst(self, tag: str, count: int) -> list[tuple[str, int]]:
        """Return name and size of the `count` rows with a tag that have the least worth."""
        order = "SELECT key, size FROM Cache WHERE tag = ? ORDER BY json_extract(value, '$.worth') LIMIT ?"
        return self._rows(order, tag, count)

    def rows(self, *tags: str) -> list[tuple[str, Record, float | None, str]]:
        """Return name, record, expiry and tag of rows with these tags."""
        statement = "SELECT key, value, expire_time FROM Cache WHERE tag = ?"
        rows = [(tag, row) for tag in tags for row in self._rows(statement, tag)]
        key = self._opened.disk.get
        return [(key(name, True), Record.from_json(value), expires, tag) for tag, (name, value, expires) in rows]

    def size_of(self, *tags: str) -> int:
        statement = "SELECT COALESCE(SUM(size), 0) FROM Cache WHERE tag = ?"
        return sum(self._rows(statement, tag)[0][0] for tag in tags)

    def count(self, *tags: str) -> int:
        return sum(self._rows("SELECT COUNT(*) FROM Cache WHERE tag = ?", tag)[0][0] for tag in tags)

    def clear(self) -> None:
        """Remove all rows but the reservations: their writers may be alive."""
        self._rows("DELETE FROM Cache WHERE tag IS NOT ?", WRITING)

    def close(self) -> None:
        self._opened.close()

    @property
    def _cache(self) -> diskcache.Cache:
        if inode(self._path.parent) != self.file_number:
            raise IndexReplaced(f"{self._path} was removed or replaced while it was open")
        return self._opened

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        return list(self._cache._sql(statement, values).fetchall())


def open_index(folder: Path, damaged: int | None = None) -> tuple[Index, str | None]:
    """Open an index, or a new empty one in the place of a damaged one; return it, and what was repaired or None.

    One process at a time, so that none removes what another has just made. Errors are `INDEX_FAILURES`.
    """
    lock = os.open(folder.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # no locks on this filesystem
            fcntl.flock(lock, fcntl.LOCK_EX)
        if damaged is not None and damaged == inode(folder):
            reason = "found while it was used"
        else:
            try:
                return Index(folder), None
            except (*INDEX_FAILURES, *PARSE_ERRORS) as error:
                if isinstance(error, INDEX_FAILURES) and not is_damage(error):
                    raise
                reason = str(error)
        shutil.rmtree(folder)
        return Index(folder), f"its index was damaged ({reason}) and has been rebuilt from the files"
    finally:
        os.close(lock)


def inode(folder: Path) -> int | None:
    """Return the inode of the database in a folder, or None if there is none."""
    try:
        return os.stat(f"{folder}/cache.db").st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_damage(error: BaseException) -> bool:
    """Return whether an error says that the index is damaged, and not that the disk is full or busy."""
    damaged = isinstance(error, sqlite3.Error) and any(message in str(error) for message in DAMAGE_MESSAGES)
    return damaged or isinstance(error, CorruptEntry)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reserved bytes of an entry that is being written to the file `temporary`."""

    address: str
    temporary: Path
    size: int


class DiskQuota:
    """Keeps the files of a store within its limit."""

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
        self.evicted = 0  # number of entries

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

    def publish(self, reservation: Reservation, kv_dtype: str, saved_ms: float, expires: float | None) -> None:
        """Turn a reservation whose file is written into an entry."""
        usage = EntryUsage(reservation.size, saved_ms, 1.0, time.time())
        with self.index.transact():
            self.index.delete(reservation.temporary.name)
            self._set_entry(reservation.address, usage, kv_dtype, expires)
            # Last: a failure before it undoes the whole transaction.
            self._files.publish(reservation.temporary, reservation.address)

    def release(self, reservation: Reservation) -> None:
        """Remove a reservation and its file; a file that is published already, but not indexed, is indexed."""
        removed = self._files.remove_temporary(reservation.temporary.name)
        with self.index.transact():
            self.index.delete(reservation.temporary.name)
            if not removed:
                self._index_published(reservation.address)

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
                size, now = file_size(path), time.time()
                if size is not None and self.index.get(path.name) is None:
                    row = Record(EntryUsage(size, 0.0, 1.0, now))
                    self.index.set(path.name, row, WRITING, expires=now + WRITE_TIMEOUT_S)
            self.reclaim()
            self.index_new_files()
            self.remove_lost()
            self._evict_for(0)

    def remove_lost(self) -> int:
        """Remove the rows whose files are gone, each in a transaction of its own; return how many."""
        count = 0
        for name, _, _, tag in self.index.rows(ENTRY, PINNED, QUARANTINE):
            path = self._files.quarantined / name if tag == QUARANTINE else self._files.path(name)
            if file_size(path) is None:
                with self.index.transact():
                    count += file_size(path) is None and self.index.delete(name)
        return count

    def index_new_files(self) -> tuple[int, list[tuple[str, str]]]:
        """Add every file without a row, as `remove_lost`; return their number, and address and damage of others."""
        found, damaged = 0, []
        indexed = {name for name, *_ in self.index.rows(ENTRY, PINNED, QUARANTINE)}
        for address in [address for address, _ in self._files.entries() if address not in indexed]:
            with self.index.transact():
                if self.index.get(address) is None and self._files.size(address) is not None:
                    damage = self._index_file(address)
                    found += damage is None
                    damaged += [] if damage is None else [(address, damage)]
        for path in [path for path in self._files.quarantined_entries() if path.name not in indexed]:
            with self.index.transact():
                if self.index.get(path.name) is None and path.exists():
                    self._index_quarantined(path, "")
        return found, damaged

    def pin(self, address: str, *, pinned: bool) -> bool:
        """Exempt an entry from eviction, or undo that; return whether there is such an entry."""
        with self.index.transact():
            row = self.index.get(address)
            if row is not None:
                self.index.set(address, row[0], PINNED if pinned else ENTRY, row[1])
            return row is not None

    def remove(self, address: str) -> bool:
        """Remove an entry and its copy in quarantine; return whether there was such an entry."""
        with self.index.transact():
            # Files first: a file without a row would still be read.
            quarantined = self._files.path(address).name
            self._files.remove_quarantined(quarantined)
            self.index.delete(quarantined)
            had_file = self._files.remove(address)
            return self.index.delete(address) or had_file

    def clear_quarantine(self) -> None:
        """Remove all damaged entries."""
        with self.index.transact():
            for name in {path.name for path in self._files.quarantined_entries()}:
                self._files.remove_quarantined(name)
            for name, *_ in self.index.rows(QUARANTINE):
                self.index.delete(name)

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
        with suppress(*INDEX_FAILURES), self.index.transact(timeout_s=timeout_s):
            self._write_uses()

    def reclaim(self) -> int:
        """Remove expired entries, and rows and files of dead writers; return how many files these had left."""
        now, leftovers = time.time(), 0
        for name, record, expires, _ in self.index.rows(WRITING):
            gone = file_size(self._files.temporary(name)) is None
            if gone or now > (expires or 0.0) or self._files.is_abandoned(name):
                self.index.delete(name)
                if self._files.remove_temporary(name):
                    leftovers += 1
                else:  # the writer may have died before it indexed the file
                    self._index_published(record.about)
        for path in list(self._files.temporaries()):
            if self.index.get(path.name) is None and self._files.is_abandoned(path.name):
                leftovers += self._files.remove_temporary(path.name)
        for address in self.index.expired(ENTRY, PINNED, now=now):
            self._files.remove(address)
            self.index.delete(address)
        for name in self.index.expired(QUARANTINE, now=now):
            self._files.remove_quarantined(name)
            self.index.delete(name)
        return leftovers

    def enforce_limit(self) -> None:
        """Evict entries until the limit holds, such as after it was lowered; pinned entries stay."""
        if self.index.size() > self._limit:
            with self.index.transact():
                self._evict_for(0)

    def _set_entry(self, address: str, usage: EntryUsage, kv_dtype: str, expires: float | None) -> None:
        row = self.index.get(address)
        tag = PINNED if row is not None and row[2] == PINNED else ENTRY
        self.index.set(address, Record(usage, kv_dtype, self._worth(usage)), tag, expires)

    def _index_file(self, address: str) -> str | None:
        """Add an entry's file to the index, or quarantine it if its header is damaged; return the damage, or None."""
        path = self._files.path(address)
        tokens, kv_dtype, expires = 1, "", None
        try:
            key, chunk = open_chunk(MappedFile(path, header_only=True), self._cipher)
            check_key(key, None, address)
            tokens, kv_dtype, expires = chunk.n_tokens, chunk.kv_dtype, chunk.expires
        except (ForeignEntry, OSError):
            pass  # under another secret, or not readable; but its bytes count
        except CorruptEntry as error:
            self.quarantine(address, str(error))
            return str(error)
        status = path.stat()
        usage = EntryUsage(status.st_size, tokens * UNKNOWN_MS_PER_TOKEN, 1.0, status.st_mtime)
        self._set_entry(address, usage, kv_dtype, expires)
        return None

    def _index_published(self, address: str) -> None:
        """Add an entry's file to the index unless its row matches it; every file if the address is not known."""
        if not address:
            self.index_new_files()
            return
        size, row = self._files.size(address), self.index.get(address)
        if size is not None and (row is None or row[0].usage.size_bytes != size):
            self._index_file(address)

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
                usage = record.usage.after_uses(now, count)
                self.index.set(address, replace(record, usage=usage, worth=self._worth(usage)), tag, expires)
