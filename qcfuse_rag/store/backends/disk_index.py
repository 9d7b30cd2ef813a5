"""The index of a store on disk: what each file takes and is worth, which are pinned, and what is being written.

diskcache keeps it: a table in SQLite with sizes, expiry and tags, safe between threads and processes. The index is
never needed to read an entry, only to keep the folder within its limit, and can be made again from the files.

diskcache by itself pickles what it does not know and unpickles what it finds (CVE-2025-69872). `TextDisk` takes away
both: keys and values are text, and anything else found in the index is an error, never executed.
"""

from __future__ import annotations

import json
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

ENTRY, PINNED, WRITING, QUARANTINE = "entry", "pinned", "writing", "quarantine"
"""Tags: what a row stands for."""

INDEX_FAILURES = (sqlite3.Error, diskcache.Timeout, CorruptEntry, OSError)
DAMAGE_MESSAGES = ("malformed", "not a database")
BUSY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Record:
    """A row of the index.

    Attributes:
        usage: size and uses; a row that is being written has its size set aside.
        numbers: format the entry is written in.
        worth: rank among entries; the smallest is evicted first.
        about: of a row that is being written, the address; of one in quarantine, what was wrong.
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
        """Return the form in the index."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the form in the index.

        Raises:
            CorruptEntry: if it is not one.
        """
        try:
            data = json.loads(text)
            return cls(EntryUsage(**data.pop("usage")), **data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptEntry(f"the index holds a record that makes no sense: {error}") from error


class TextDisk(diskcache.Disk):  # type: ignore[misc]
    """Serialisation for diskcache that knows text as keys and records as values, and nothing else."""

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
        """Return a record's form in the index, with the size of the file it stands for."""
        if not isinstance(value, Record) or read:
            raise TypeError(f"values are records, got {type(value).__name__}")
        return value.usage.size_bytes, MODE_RAW, None, value.to_json()

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Record:
        """Return a record from its form in the index."""
        if mode != MODE_RAW or filename is not None or not isinstance(value, str) or read:
            raise CorruptEntry("the index holds a value that is not text; it was not read")
        return Record.from_json(value)


class Index:
    """Rows by name: an entry's is its address.

    Args:
        folder: where the database is.

    Raises:
        OSError, sqlite3.Error, diskcache.Timeout: if it cannot be opened.
        CorruptEntry: if it holds what this library does not write.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(
            FileExistsError
        ):  # for its owner only. Never opened once it exists: closing it drops SQLite's locks
            os.close(os.open(folder / "cache.db", os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # Nothing is culled by diskcache itself, whose limit holds only after the fact. Nothing is mapped into memory: a
        # disk error there is a signal that ends the process.
        options = {"eviction_policy": "none", "cull_limit": 0, "sqlite_mmap_size": 0}
        self._cache = diskcache.Cache(str(folder), disk=TextDisk, **options)
        strange = (
            "raw IS NOT 1 OR mode IS NOT 1 OR typeof(key) != 'text' OR typeof(value) != 'text' OR filename IS NOT NULL"
            " OR json_extract(value, '$.usage.size_bytes') IS NOT size"
            f" OR (tag IN ('{ENTRY}', '{PINNED}') AND key GLOB '*[^0-9a-f-]*')"
            f" OR (tag = '{WRITING}' AND json_extract(value, '$.about') GLOB '*[^0-9a-f-]*')"
            rf" OR (tag IN ('{WRITING}', '{QUARANTINE}') AND key GLOB '*[/\]*')"
        )
        if self._rows(f"SELECT COUNT(*) FROM Cache WHERE {strange}")[0][0]:
            raise CorruptEntry("the index holds what this library does not write")
        # diskcache has no order of our own making; its table and `_sql` are those of its last release, 5.6.3.
        self._cache._sql("CREATE INDEX IF NOT EXISTS Cache_worth ON Cache (tag, json_extract(value, '$.worth'))")

    @contextmanager
    def transact(self, *, patience_s: float = BUSY_TIMEOUT_S) -> Iterator[None]:
        """Hold the index against all other writers, who see all or nothing of what happens inside.

        Args:
            patience_s: longest time to wait for another writer.

        Raises:
            sqlite3.Error: if the index cannot be had or cannot be written.
        """
        self._cache._sql(f"PRAGMA busy_timeout = {round(1000 * patience_s)}")
        try:
            with self._cache.transact():
                yield
        except diskcache.Timeout as error:  # stands for every failure to begin; say which
            raise error.__context__ or error from None

    def size(self) -> int:
        """Bytes of all rows."""
        return int(self._cache.reset("size", update=False))

    def get(self, name: str) -> tuple[Record, float | None, str] | None:
        """Return a row with its expiry and tag, or None if there is none or it has expired."""
        record, expires, tag = self._cache.get(name, expire_time=True, tag=True)
        return None if record is None else (record, expires, tag)

    def set(self, name: str, record: Record, tag: str, expires: float | None = None) -> None:
        """Write a row, replacing one of that name."""
        left = None if expires is None else expires - time.time()
        self._cache.set(name, record, expire=left, tag=tag)

    def delete(self, name: str) -> bool:
        """Remove a row; return whether there was one."""
        found = self._rows("SELECT COUNT(*) FROM Cache WHERE key = ?", name)[0][0]
        self._cache._sql("DELETE FROM Cache WHERE key = ? AND raw = 1", (name,))
        return bool(found)

    def expired(self, *tags: str, now: float) -> list[tuple[str, int]]:
        """Return name and size of rows with these tags whose time is over."""
        statement = "SELECT key, size FROM Cache WHERE tag = ? AND expire_time < ?"
        return [row for tag in tags for row in self._rows(statement, tag, now)]

    def worst(self, tag: str, count: int) -> list[tuple[str, int]]:
        """Return name and size of up to `count` rows with a tag, by rising worth."""
        order = "SELECT key, size FROM Cache WHERE tag = ? ORDER BY json_extract(value, '$.worth') LIMIT ?"
        return self._rows(order, tag, count)

    def rows(self, *tags: str) -> Iterator[tuple[str, Record, float | None, str]]:
        """Yield name, record, expiry and tag of rows with these tags."""
        for tag in tags:
            for name, value, expires in self._rows("SELECT key, value, expire_time FROM Cache WHERE tag = ?", tag):
                yield name, Record.from_json(value), expires, tag

    def size_of(self, *tags: str) -> int:
        """Bytes of rows with these tags."""
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


def open_index(folder: Path) -> tuple[Index | None, str | None, str | None]:
    """Open the index of a store, an empty one in the place of one that is damaged.

    Returns:
        The index or None; what has been mended; what is the matter if there is no index.
    """
    try:
        return Index(folder), None, None
    except INDEX_FAILURES as error:
        if not isinstance(error, CorruptEntry) and not any(sign in str(error) for sign in DAMAGE_MESSAGES):
            return None, None, f"its index cannot be opened: {error}"
        reason = str(error)
    try:
        shutil.rmtree(folder)
        return Index(folder), f"its index was damaged ({reason}) and has been made again from the files", None
    except INDEX_FAILURES as error:
        return None, None, f"its index is damaged ({reason}) and cannot be made again: {error}"
