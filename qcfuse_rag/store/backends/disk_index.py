"""The index of a store on disk: size, worth, pin and expiry of each file, and which files are being written.

It is a diskcache: a table in SQLite with sizes, expiry and tags, safe between threads and processes. The index is never
needed to read an entry, only to keep the folder within its limit, and can be rebuilt from the files.

By itself, diskcache pickles unknown values and unpickles what it finds (CVE-2025-69872). `TextDisk` prevents both: keys
and values are text, and anything else in the index is an error and is never executed.
"""

from __future__ import annotations

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
from qcfuse_rag.store.backends.disk_files import ADDRESS
from qcfuse_rag.store.backends.eviction import EntryUsage
from qcfuse_rag.store.entry.codec import PARSE_ERRORS
from qcfuse_rag.store.regular_file import is_regular

ENTRY, PINNED, WRITING, QUARANTINE = "entry", "pinned", "writing", "quarantine"
"""Tags of rows: an entry, a pinned entry, a reservation of a file being written, a file in quarantine."""

INDEX_FAILURES = (sqlite3.Error, diskcache.Timeout, CorruptEntry, OSError)
DAMAGE_MESSAGES = ("malformed", "not a database")
BUSY_TIMEOUT_S = 60.0


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


class Index:
    """Rows by name; the name of an entry's row is its address.

    Args:
        folder: of the database.

    Raises:
        OSError, sqlite3.Error, diskcache.Timeout: if it cannot be opened.
        CorruptEntry: if it has rows that this library does not write.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in ("cache.db", "cache.db-wal", "cache.db-shm", "cache.db-journal"):
            path = folder / name
            if os.path.lexists(path) and not is_regular(path):
                raise OSError(f"{path} is not a regular file")
        # Created for its owner only. Never opened once it exists: closing it would drop SQLite's locks.
        with suppress(FileExistsError):
            os.close(os.open(folder / "cache.db", os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # diskcache itself must not evict: its limit holds only afterwards. Nothing is mapped into memory: a disk error
        # there is a signal that ends the process.
        options = {"eviction_policy": "none", "cull_limit": 0, "sqlite_mmap_size": 0}
        self._cache = diskcache.Cache(str(folder), disk=TextDisk, **options)
        about, stem = "json_extract(value, '$.about')", "substr(key, 1, length(key) - 3)"
        invalid = (
            "raw IS NOT 1 OR mode IS NOT 1 OR typeof(key) != 'text' OR typeof(value) != 'text' OR filename IS NOT NULL"
            " OR json_extract(value, '$.usage.size_bytes') IS NOT size"
            " OR typeof(size) != 'integer' OR size < 0 OR typeof(expire_time) NOT IN ('real', 'integer', 'null')"
            f" OR tag IS NULL OR tag NOT IN ('{ENTRY}', '{PINNED}', '{WRITING}', '{QUARANTINE}')"
            f" OR (tag IN ('{ENTRY}', '{PINNED}') AND {_no_address('key')})"
            f" OR (tag = '{WRITING}' AND {_no_address(about)})"
            rf" OR (tag = '{WRITING}' AND key GLOB '*[/\]*')"
            f" OR (tag = '{QUARANTINE}' AND (key NOT GLOB '*.kv' OR {_no_address(stem)}))"
        )
        if self._rows(f"SELECT COUNT(*) FROM Cache WHERE {invalid}")[0][0]:
            raise CorruptEntry("the index holds rows that this library does not write")
        total = "SELECT COALESCE(SUM(size), 0) FROM Cache"
        if self._rows(f"SELECT (SELECT value FROM Settings WHERE key = 'size') IS NOT ({total})")[0][0]:
            raise CorruptEntry("the index holds a wrong sum of bytes")
        for _ in self.rows(ENTRY, PINNED, WRITING, QUARANTINE):
            pass  # every record can be parsed
        # diskcache has no order by worth; the table and `_sql` are those of its last release, 5.6.3.
        self._cache._sql("CREATE INDEX IF NOT EXISTS Cache_worth ON Cache (tag, json_extract(value, '$.worth'))")

    @contextmanager
    def transact(self, *, timeout_s: float = BUSY_TIMEOUT_S) -> Iterator[None]:
        """Lock the index against all other writers, and commit or roll back all changes together.

        Args:
            timeout_s: longest time to wait for another writer.

        Raises:
            sqlite3.Error: if the index cannot be locked or written.
        """
        self._cache._sql(f"PRAGMA busy_timeout = {round(1000 * timeout_s)}")
        try:
            with self._cache.transact():
                yield
        except diskcache.Timeout as error:  # raised for every failure to begin; raise its cause
            raise error.__context__ or error from None

    def size(self) -> int:
        """Return the bytes of all rows."""
        size = self._cache.reset("size", update=False)
        if type(size) is not int:
            raise CorruptEntry("the index holds a size that is not a number")
        return size

    def get(self, name: str) -> tuple[Record, float | None, str] | None:
        """Return a row with its expiry and tag, or None if there is none or it has expired."""
        record, expires, tag = self._cache.get(name, expire_time=True, tag=True)
        if record is None:
            return None
        _check_row(name, expires, tag)
        return record, expires, tag

    def set(self, name: str, record: Record, tag: str, expires: float | None = None) -> None:
        """Write a row, replacing one of that name."""
        expires_in = None if expires is None else expires - time.time()
        self._cache.set(name, record, expire=expires_in, tag=tag)

    def delete(self, name: str) -> bool:
        """Remove a row; return whether there was one."""
        count = self._rows("SELECT COUNT(*) FROM Cache WHERE key = ?", name)[0][0]
        self._cache._sql("DELETE FROM Cache WHERE key = ? AND raw = 1", (name,))
        return bool(count)

    def expired(self, *tags: str, now: float) -> list[tuple[str, int]]:
        """Return name and size of expired rows with these tags."""
        statement = "SELECT key, size FROM Cache WHERE tag = ? AND expire_time < ?"
        rows = [(tag, row) for tag in tags for row in self._rows(statement, tag, now)]
        for tag, (name, _) in rows:
            _check_row(name, None, tag)
        return [row for _, row in rows]

    def worst(self, tag: str, count: int) -> list[tuple[str, int]]:
        """Return name and size of the `count` rows with a tag that have the least worth."""
        order = "SELECT key, size FROM Cache WHERE tag = ? ORDER BY json_extract(value, '$.worth') LIMIT ?"
        rows = self._rows(order, tag, count)
        for name, _ in rows:
            _check_row(name, None, tag)
        return rows

    def rows(self, *tags: str) -> Iterator[tuple[str, Record, float | None, str]]:
        """Yield name, record, expiry and tag of rows with these tags."""
        for tag in tags:
            for name, value, expires in self._rows("SELECT key, value, expire_time FROM Cache WHERE tag = ?", tag):
                _check_row(name, expires, tag)
                yield name, Record.from_json(value), expires, tag

    def size_of(self, *tags: str) -> int:
        """Return the bytes of rows with these tags."""
        statement = "SELECT COALESCE(SUM(size), 0) FROM Cache WHERE tag = ?"
        return sum(self._rows(statement, tag)[0][0] for tag in tags)

    def count(self, *tags: str) -> int:
        """Return how many rows have these tags."""
        return sum(self._rows("SELECT COUNT(*) FROM Cache WHERE tag = ?", tag)[0][0] for tag in tags)

    def clear(self) -> None:
        """Remove all rows."""
        self._cache.clear()

    def close(self) -> None:
        """Close the database."""
        self._cache.close()

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        return list(self._cache._sql(statement, values).fetchall())


def _check_row(name: Any, expires: Any, tag: Any) -> None:
    """Raise `CorruptEntry` if a row that was changed since the index was opened makes no sense."""
    sound = isinstance(name, str) and isinstance(tag, str) and isinstance(expires, int | float | None)
    if not sound or (tag in (ENTRY, PINNED) and not ADDRESS.fullmatch(name)):
        raise CorruptEntry("the index holds a row that makes no sense; `qcfuse store rebuild` repairs it")


def _no_address(text: str) -> str:
    """Return an SQL condition that holds unless an SQL expression is the address of an entry."""
    plain = f"{text} GLOB '*[^0-9a-f]*' OR length({text}) IS NOT 32"
    prefix, rest = f"substr({text}, 1, 16)", f"substr({text}, 18)"
    tenant = f"{prefix} GLOB '*[^0-9a-f]*' OR {rest} GLOB '*[^0-9a-f]*' OR length({text}) IS NOT 49"
    return f"(({plain}) AND ({tenant} OR substr({text}, 17, 1) != '-'))"


def open_index(folder: Path) -> tuple[Index | None, str | None, str | None]:
    """Open the index of a store; replace a damaged one by an empty one.

    Returns:
        The index or None; what was repaired, or None; why there is no index, or None.
    """
    try:
        return Index(folder), None, None
    except (*INDEX_FAILURES, *PARSE_ERRORS) as error:
        damaged = isinstance(error, CorruptEntry) or not isinstance(error, INDEX_FAILURES)
        if not damaged and not any(message in str(error) for message in DAMAGE_MESSAGES):
            return None, None, f"its index cannot be opened: {error}"
        reason = str(error)
    try:
        shutil.rmtree(folder)
        return Index(folder), f"its index was damaged ({reason}) and has been rebuilt from the files", None
    except INDEX_FAILURES as error:
        return None, None, f"its index is damaged ({reason}) and cannot be rebuilt: {error}"
