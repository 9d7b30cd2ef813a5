"""The database of a store's index: its rows as records, opening it, checking it, replacing a damaged one.

By itself, diskcache pickles unknown values and unpickles what it finds (CVE-2025-69872). `TextDisk` prevents both: keys
and values are text, and anything else in the index is an error and is never executed.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import diskcache
from diskcache.core import MODE_RAW, UNKNOWN

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.backends.eviction import EntryUsage
from qcfuse_rag.store.entry.codec import PARSE_ERRORS
from qcfuse_rag.store.regular_file import is_regular

ENTRY, PINNED, WRITING, QUARANTINE = "entry", "pinned", "writing", "quarantine"
"""Tags of rows: an entry, a pinned entry, a reservation of a file being written, a file in quarantine."""

INDEX_FAILURES = (sqlite3.Error, diskcache.Timeout, CorruptEntry, OSError)
LOSS_MESSAGES = ("malformed", "not a database", "no such table")
"""Parts of the messages that say that the open database is not what it was; opening it again may help."""

OPEN_TIMEOUT_S = 10.0
OPEN_TRIES, OPEN_PAUSE_S = 5, 0.02
UNREADABLE_MESSAGE = "disk I/O error"
SPARE_BYTES = 1 << 20
"""With this much free space, a failure of SQLite is not a full disk."""

FILES = ("cache.db", "cache.db-wal", "cache.db-shm")
"""The database, its log, and the memory that its users share."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row of the index.

    Attributes:
        usage: size and uses; of a file that is being written, the reserved size.
        numbers: format the entry is written in.
        worth: rank among entries; the smallest is evicted first.
        about: of a file that is being written, its address; of a file in quarantine, the damage.
    """

    usage: EntryUsage
    numbers: str = ""
    worth: float = 0.0
    about: str = ""

    def after_uses(self, now: float, count: int, worth: Callable[[EntryUsage], float]) -> Record:
        """Return the record after `count` more uses, ranked by `worth`."""
        usage = self.usage.after_uses(now, count)
        return replace(self, usage=usage, worth=worth(usage))

    def to_json(self) -> str:
        """Return the JSON text that the index holds."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the JSON text that the index holds.

        Raises:
            CorruptEntry: if it is not a record.
        """
        try:
            data = json.loads(text)
            usage = EntryUsage(**data.pop("usage"))
            record = cls(usage, **data)
            numbers = (usage.saved_ms, usage.uses, usage.used, record.worth)
            if type(usage.size_bytes) is not int or not all(type(number) in (int, float) for number in numbers):
                raise ValueError("a number is none")
            if usage.size_bytes < 0 or usage.uses <= 0 or not all(map(math.isfinite, numbers)):
                raise ValueError("a number is out of range")
            if not isinstance(record.numbers, str) or not isinstance(record.about, str):
                raise ValueError("a text is none")
        except PARSE_ERRORS as error:
            raise CorruptEntry(f"the index holds a record that makes no sense: {str(error)[:100]}") from error
        return record


class TextDisk(diskcache.Disk):  # type: ignore[misc]
    """Serialisation for diskcache with text as keys and records as values, and nothing else."""

    def put(self, key: Any) -> tuple[str, bool]:
        """Return a key's form in the index."""
        if not isinstance(key, str):
            raise TypeError(f"keys are strings, got {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: bool) -> str:
        """Return a key from its form in the index."""
        if not raw or not isinstance(key, str):
            raise CorruptEntry("the index holds a key that is not text; it was not written by this library")
        return key

    def store(self, value: Any, read: bool, key: Any = UNKNOWN) -> tuple[int, int, None, str]:
        """Return a record's form in the index, with the size of its file."""
        if not isinstance(value, Record) or read:
            raise TypeError(f"values are records, got {type(value).__name__}")
        return value.usage.size_bytes, MODE_RAW, None, value.to_json()

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Record:
        """Return a record from its form in the index."""
        if mode != MODE_RAW or filename is not None or not isinstance(value, str) or read:
            raise CorruptEntry("the index holds a value that is not text; it was not read")
        return Record.from_json(value)


Identity = tuple[tuple[int, int] | None, ...]
"""Device and inode of each of `FILES`; None for one that does not exist."""


@dataclass(slots=True)
class OpenIndex:
    """An open database of an index.

    Attributes:
        cache: the database.
        connection: kept open, so that the log stays the same file while any thread uses the database.
        identity: of its files, see `identity`.
        version: number of the last transaction seen; each one that changes something adds 1.
        process: that opened it.
    """

    cache: diskcache.Cache
    connection: sqlite3.Connection | None
    identity: Identity
    version: int
    process: int


def is_lost(error: BaseException) -> bool:
    """Return whether an error says that the open database is not what it was."""
    return isinstance(error, CorruptEntry) or any(message in str(error) for message in LOSS_MESSAGES)


def open_or_replace(folder: Path, lost: Identity | None = None) -> tuple[OpenIndex, str | None]:
    """Open a database, or a new one in the place of a damaged one; return it, and what was repaired or None.

    One process at a time, so that none removes what another has just made. A database that SQLite cannot read although
    the disk has room is opened again for a moment, then replaced: its files do not belong together.

    Args:
        folder: of the database.
        lost: identity of a database that must not be opened again: it is not what it was, or SQLite's log of it is
            gone, and SQLite would go on with the old log inside this process.

    Raises:
        OSError, sqlite3.Error, diskcache.Timeout, CorruptEntry: if it cannot be opened.
    """
    with _locked(folder.parent):
        try:
            if lost is not None and lost[0] is not None and identity(folder)[0] == lost[0]:
                shutil.rmtree(folder)
            return _open_patiently(folder), None
        except (*INDEX_FAILURES, *PARSE_ERRORS) as error:
            damaged = isinstance(error, CorruptEntry) or not isinstance(error, INDEX_FAILURES)
            if not damaged and not is_lost(error) and not _is_unreadable(error, folder):
                raise
            reason = str(error)
        try:
            shutil.rmtree(folder)
            return _open_database(folder), f"its index was damaged ({reason}) and has been rebuilt from the files"
        except INDEX_FAILURES as error:
            raise OSError(f"it is damaged ({reason}) and cannot be rebuilt: {error}") from error


def _open_patiently(folder: Path) -> OpenIndex:
    """Open a database; try again if SQLite cannot read it, since another process may be replacing its files."""
    for _ in range(OPEN_TRIES - 1):
        with suppress(sqlite3.OperationalError):
            return _open_database(folder)
        time.sleep(OPEN_PAUSE_S)
    return _open_database(folder)


def _is_unreadable(error: BaseException, folder: Path) -> bool:
    """Return whether SQLite failed to read a database, and not for want of room."""
    return UNREADABLE_MESSAGE in str(error) and shutil.disk_usage(folder).free > SPARE_BYTES


def _open_database(folder: Path) -> OpenIndex:
    """Open a database and check every row.

    Raises:
        OSError, sqlite3.Error, diskcache.Timeout: if it cannot be opened.
        CorruptEntry: if it has rows that this library does not write.
    """
    if folder.is_symlink():
        raise OSError(f"{folder} is a symbolic link")
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in (*FILES, "cache.db-journal"):
        path = folder / name
        if os.path.lexists(path) and not is_regular(path):
            raise OSError(f"{path} is not a regular file")
    # Created for its owner only. Never opened once it exists: closing it would drop SQLite's locks.
    with suppress(FileExistsError):
        os.close(os.open(folder / FILES[0], os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if not os.stat(folder / FILES[0]).st_size and (folder / FILES[1]).exists():
        raise CorruptEntry("the index was cut")  # opening it would wait for those who use it
    before = identity(folder)[0]
    # diskcache itself must not evict: its limit holds only afterwards. Nothing is mapped into memory: a disk error
    # there is a signal that ends the process.
    options = {"eviction_policy": "none", "cull_limit": 0, "sqlite_mmap_size": 0, "sqlite_secure_delete": 1}
    cache = diskcache.Cache(str(folder), disk=TextDisk, **options)
    about, stem = "json_extract(value, '$.about')", "substr(key, 1, length(key) - 3)"
    invalid = (
        "raw IS NOT 1 OR mode IS NOT 1 OR typeof(key) != 'text' OR typeof(value) != 'text' OR filename IS NOT NULL"
        " OR json_extract(value, '$.usage.size_bytes') IS NOT size"
        " OR typeof(size) != 'integer' OR size < 0 OR typeof(expire_time) NOT IN ('real', 'integer', 'null')"
        f" OR tag IS NULL OR tag NOT IN ('{ENTRY}', '{PINNED}', '{WRITING}', '{QUARANTINE}')"
        f" OR (tag IN ('{ENTRY}', '{PINNED}') AND {_no_address('key')})"
        f" OR (tag = '{WRITING}' AND {about} IS NOT '' AND {_no_address(about)})"
        rf" OR (tag = '{WRITING}' AND key GLOB '*[/\]*')"
        f" OR (tag = '{QUARANTINE}' AND (key NOT GLOB '*.kv' OR {_no_address(stem)}))"
    )
    if cache._sql(f"SELECT COUNT(*) FROM Cache WHERE {invalid}").fetchone()[0]:
        raise CorruptEntry("the index holds rows that this library does not write")
    total = "SELECT COALESCE(SUM(size), 0) FROM Cache"
    if cache._sql(f"SELECT (SELECT value FROM Settings WHERE key = 'size') IS NOT ({total})").fetchone()[0]:
        raise CorruptEntry("the index holds a wrong sum of bytes")
    for (value,) in cache._sql("SELECT value FROM Cache"):
        Record.from_json(value)
    # diskcache has no order by worth; the table and `_sql` are those of its last release, 5.6.3.
    cache._sql("CREATE INDEX IF NOT EXISTS Cache_worth ON Cache (tag, json_extract(value, '$.worth'))")
    version = int(cache._sql("PRAGMA user_version").fetchone()[0])
    opened = identity(folder)
    if opened[0] != before:
        raise OSError(f"{folder / FILES[0]} was replaced while it was opened; try again")
    return OpenIndex(cache, cache._con, opened, version, os.getpid())


def identity(folder: Path) -> Identity:
    """Return device and inode of each file of a database; None for one that does not exist."""
    inodes: list[tuple[int, int] | None] = []
    for name in FILES:
        try:
            status = os.stat(f"{folder}/{name}", follow_symlinks=False)
        except OSError:
            inodes.append(None)
        else:
            inodes.append((status.st_dev, status.st_ino))
    return tuple(inodes)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, if it can be had in time: whoever keeps it for ever must not stop others."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # no locks on this filesystem
                break
            else:
                break
        yield
    finally:
        os.close(descriptor)


def _no_address(text: str) -> str:
    """Return an SQL condition that holds unless an SQL expression is the address of an entry."""
    plain = f"{text} GLOB '*[^0-9a-f]*' OR length({text}) IS NOT 32"
    prefix, rest = f"substr({text}, 1, 16)", f"substr({text}, 18)"
    tenant = f"{prefix} GLOB '*[^0-9a-f]*' OR {rest} GLOB '*[^0-9a-f]*' OR length({text}) IS NOT 49"
    return f"(({plain}) AND ({tenant} OR substr({text}, 17, 1) != '-'))"
