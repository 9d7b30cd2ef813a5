"""The index of a store on disk: size, worth, pin and expiry of each file, and which files are being written.

It is a diskcache: a table in SQLite with sizes, expiry and tags, safe between threads and processes. The index is never
needed to read an entry, only to keep the folder within its limit, and can be rebuilt from the files.

Somebody may delete or replace the database while programs use it. SQLite would go on with the file it has open, and the
folder would have two indexes. So each use compares the open files with those of that name, and opens the index again.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diskcache

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.backends.disk_files import ADDRESS
from qcfuse_rag.store.backends.index_database import (
    ENTRY,
    FILES,
    INDEX_FAILURES,
    PINNED,
    WRITING,
    OpenIndex,
    Record,
    identity,
    is_lost,
    open_or_replace,
)

BUSY_TIMEOUT_S = 60.0
MAX_REOPENINGS = 100
MAX_VERSION = 2**31


class Index:
    """Rows by name; the name of an entry's row is its address.

    Args:
        folder: of the database.

    Attributes:
        note: what was repaired when it was opened, or None.
        on_replaced: fills the index from the files; called in a transaction when another database has taken its place.

    Raises:
        OSError, sqlite3.Error, diskcache.Timeout: if it cannot be opened, or is damaged and cannot be replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened, self.note = open_or_replace(folder)
        self._lost = False
        self._lock, self._local = threading.RLock(), threading.local()
        self.on_replaced: Callable[[], object] = lambda: None

    @contextmanager
    def transact(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Lock the index against all other writers, and commit or roll back all changes together.

        Args:
            timeout_s: longest time to wait for another writer; None for `BUSY_TIMEOUT_S`.

        Raises:
            sqlite3.Error: if the index cannot be locked or written.
        """
        if getattr(self._local, "in_transaction", False):
            yield
            return
        for _ in range(MAX_REOPENINGS):
            self._follow()
            opened = self._current
            with self._pinned(opened, in_transaction=True):
                opened.cache._sql(
                    f"PRAGMA busy_timeout = {round(1000 * (BUSY_TIMEOUT_S if timeout_s is None else timeout_s))}"
                )
                try:
                    with opened.cache.transact():
                        if self._opened is not opened or not self._is_current():  # replaced while this thread waited
                            continue
                        changes = opened.cache._con.total_changes
                        version = self._version(opened)
                        if version < max(opened.version, 1):  # never filled, or emptied or replaced in the same file
                            self.on_replaced()
                        yield
                        if opened.cache._con.total_changes != changes:
                            version = (version + 1) % MAX_VERSION
                            opened.cache._sql(f"PRAGMA user_version = {version}")
                    opened.version = version
                except diskcache.Timeout as error:  # raised for every failure to begin; raise its cause
                    raise error.__context__ or error from None
                except AssertionError as error:  # diskcache: two threads hold the lock, since its files were destroyed
                    self._lost = True
                    raise CorruptEntry("the index lost its lock; its files were destroyed while it was used") from error
                except (sqlite3.Error, CorruptEntry) as error:
                    self._lost = self._lost or is_lost(error)
                    raise
            self._follow()  # what was committed to a file that was replaced meanwhile is not in the new one
            return
        raise self._always_replaced()

    def size(self) -> int:
        """Return the bytes of all rows."""
        sizes = self._rows("SELECT value FROM Settings WHERE key = 'size'")
        if len(sizes) != 1 or type(sizes[0][0]) is not int:
            raise CorruptEntry("the index holds no sum of bytes")
        return int(sizes[0][0])

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
        """Remove all rows but the reservations: their writers may be alive."""
        self._cache._sql("DELETE FROM Cache WHERE tag IS NOT ?", (WRITING,))

    def close(self) -> None:
        """Close the database."""
        self._opened.cache.close()
        self._opened.connection = None

    @property
    def _cache(self) -> diskcache.Cache:
        self._follow()
        return self._current.cache

    @property
    def _current(self) -> OpenIndex:
        """Return the database of this thread's transaction; without a transaction, the newest open database."""
        pinned: OpenIndex | None = getattr(self._local, "opened", None)
        return pinned or self._opened

    @contextmanager
    def _pinned(self, opened: OpenIndex, *, in_transaction: bool) -> Iterator[None]:
        """Let this thread work on one database, whatever takes its place meanwhile."""
        self._local.opened, self._local.in_transaction = opened, in_transaction
        try:
            yield
        finally:
            self._local.opened, self._local.in_transaction = None, False

    def _follow(self) -> None:
        """Open the database again if its files are not those of that name any more, and fill it from the files.

        Raises:
            OSError, sqlite3.Error, diskcache.Timeout, CorruptEntry: if that fails, or it is replaced all the time.
        """
        if getattr(self._local, "opened", None) is not None:
            return
        for _ in range(MAX_REOPENINGS):
            if self._is_current():
                return
            with self._lock:
                if not self._is_current():
                    self._reopen()
        raise self._always_replaced()

    def _always_replaced(self) -> OSError:
        return OSError(f"{self._folder / FILES[0]} is replaced all the time; stop the program that does it")

    def _is_current(self) -> bool:
        opened = self._opened
        return not self._lost and opened.process == os.getpid() and identity(self._folder) == opened.identity

    def _reopen(self) -> None:
        """Open the database again; fill it from the files unless it is the same one."""
        old, same = self._opened, not self._lost and identity(self._folder) == self._opened.identity
        opened, _ = open_or_replace(self._folder, None if same else old.identity)
        self._lost = False
        if not same or opened.identity != old.identity:
            with self._pinned(opened, in_transaction=False):  # no other thread uses it before all files count
                opened.cache._sql(f"PRAGMA busy_timeout = {round(1000 * BUSY_TIMEOUT_S)}")
                with opened.cache.transact():
                    self._local.in_transaction = True
                    self.on_replaced()
        self._opened = opened

    @staticmethod
    def _version(opened: OpenIndex) -> int:
        return int(opened.cache._sql("PRAGMA user_version").fetchone()[0])

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        try:
            return list(self._cache._sql(statement, values).fetchall())
        except sqlite3.Error as error:
            self._lost = self._lost or is_lost(error)
            raise


def _check_row(name: Any, expires: Any, tag: Any) -> None:
    """Raise `CorruptEntry` if a row that was changed since the index was opened makes no sense."""
    sound = isinstance(name, str) and isinstance(tag, str) and isinstance(expires, int | float | None)
    if not sound or (tag in (ENTRY, PINNED) and not ADDRESS.fullmatch(name)):
        raise CorruptEntry("the index holds a row that makes no sense; `qcfuse store rebuild` repairs it")


def open_index(folder: Path) -> tuple[Index | None, str | None, str | None]:
    """Open the index of a store; replace a damaged one by an empty one.

    Returns:
        The index or None; what was repaired, or None; why there is no index, or None.
    """
    try:
        index = Index(folder)
    except INDEX_FAILURES as error:
        return None, None, f"its index cannot be opened: {error}"
    return index, index.note, None
