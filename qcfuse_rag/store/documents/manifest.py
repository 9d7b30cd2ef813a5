"""The manifest: the database of a store's sources, `sources.db` beside the entries.

`chunks` says which source has which entry; `passage` names a passage under whatever base it is stored. `derived` says
which passages (`origin`) an entry was computed from. `unwanted` lists the entries to remove, `gone` those removed,
`lost` the passages that lost their last source. `access` holds the tags of restricted sources, `located` what passages
are recognised by in a text.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from qcfuse_rag.errors import StoreError

SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (
    source TEXT, address TEXT, wording TEXT, passage TEXT, PRIMARY KEY (source, address)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chunks_by_address ON chunks (address);
CREATE INDEX IF NOT EXISTS chunks_by_passage ON chunks (passage);
CREATE TABLE IF NOT EXISTS unwanted (address TEXT PRIMARY KEY, by_origin INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS derived (
    address TEXT, origin TEXT, passage TEXT, PRIMARY KEY (address, origin)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS derived_by_origin ON derived (origin);
CREATE TABLE IF NOT EXISTS lost (number INTEGER PRIMARY KEY AUTOINCREMENT, passage TEXT);
CREATE TABLE IF NOT EXISTS gone (number INTEGER PRIMARY KEY AUTOINCREMENT, address TEXT);

CREATE TABLE IF NOT EXISTS access (source TEXT PRIMARY KEY, tag TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS derived_by_passage ON derived (passage);
CREATE VIEW IF NOT EXISTS readers AS
SELECT DISTINCT passage, COALESCE(tag, '') AS tag FROM chunks LEFT JOIN access USING (source);

CREATE TABLE IF NOT EXISTS located (
    name TEXT, anchor INTEGER, atoms INTEGER, gaps BLOB, passage TEXT, PRIMARY KEY (name, passage)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS located_by_anchor ON located (anchor);
CREATE INDEX IF NOT EXISTS located_by_passage ON located (passage);
CREATE TRIGGER IF NOT EXISTS no_longer_located AFTER DELETE ON chunks
WHEN NOT EXISTS (SELECT 1 FROM chunks WHERE passage = OLD.passage)
BEGIN DELETE FROM located WHERE passage = OLD.passage; END;
"""

LAST_TABLE = "located"
"""The table that is created last: a manifest that has it has all."""

COLUMNS_ADDED = (("chunks", "passage TEXT"), ("unwanted", "by_origin INTEGER DEFAULT 0"), ("derived", "passage TEXT"))
"""Columns that manifests of earlier versions lack."""

KEPT_ROWS = 100_000
"""Most rows of `gone`, for processes that hold chunks in memory, and of `lost`, for running jobs."""

FILE_NAME = "sources.db"

WRITE_TIMEOUT_S = 60
OPEN_TIMEOUT_S = 10.0
"""Seconds to wait for other processes that open the manifest at the same time."""

DISK_FULL_MESSAGES = ("disk is full", "disk I/O error", "No space left")
"""Parts of the messages with which SQLite and the system say that nothing more can be written."""


class Manifest:
    """An open manifest. Safe to use from several threads.

    Args:
        folder: the store's folder, or None for a manifest in memory.

    Raises:
        StoreError: if the manifest cannot be opened.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self._process = os.getpid()
        self._lock = threading.Lock()
        # In memory there is only one connection, hence one lock.
        self._reader_lock = self._lock if self._path is None else threading.Lock()
        self._open()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that opened the file: SQLite cannot be shared that way."""
        return self._path is not None and self._process != os.getpid()

    def version(self) -> tuple[int, int]:
        """Return a value that changes whenever this or another process has written to the manifest.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        [(version,)] = self.read("PRAGMA data_version")
        return version, self._reader.total_changes

    def query(self, statement: str, *values: str | int) -> list[tuple[Any, ...]]:
        """Return the rows of a query, after waiting for a change that this process is making.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        with self._lock:
            return _fetch(self._database, statement, values)

    def read(self, statement: str, *values: str | int) -> list[tuple[Any, ...]]:
        """Return the rows of a query as last committed, without waiting for changes being made.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        with self._reader_lock:
            return _fetch(self._reader, statement, values)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Change the manifest in one transaction, which is rolled back if anything is raised.

        Raises:
            StoreError: if it cannot be written.
        """
        with self._lock:
            if not self._writable:  # the disk may have space again by now
                with self._reader_lock:
                    self._open()
            try:
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    yield self._database
                except BaseException:
                    if self._database.in_transaction:  # on a full disk SQLite has rolled it back itself
                        self._database.execute("ROLLBACK")
                    raise
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreError(f"cannot write the manifest of sources: {error}") from error

    def clear_log(self) -> None:
        """Empty the write-ahead log, which still has removed rows; another process's reading puts that off."""
        with self._lock, suppress(sqlite3.Error):
            self._database.execute("PRAGMA busy_timeout = 1000")
            try:
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                self._database.execute(f"PRAGMA busy_timeout = {1000 * WRITE_TIMEOUT_S}")

    def close(self) -> None:
        """Close the database."""
        with self._lock, nullcontext() if self._reader_lock is self._lock else self._reader_lock:
            self._database.close()
            self._reader.close()

    def _open(self) -> None:
        try:
            self._database, self._reader, self._writable = open_manifest(self._path)
        except (sqlite3.Error, OSError) as error:
            hint = "; `qcfuse store rebuild` moves it aside; then warm again" * ("not a database" in str(error))
            raise StoreError(f"cannot open {self._path}: {error}{hint}") from error


class OpenManifest(NamedTuple):
    """Connections to a manifest.

    Attributes:
        database: for changes.
        reader: for reading while a change is being made, which may take as long as a remote takes; the same connection
            for a manifest in memory.
        writable: whether the manifest can be changed.
    """

    database: sqlite3.Connection
    reader: sqlite3.Connection
    writable: bool


def open_manifest(path: Path | None) -> OpenManifest:
    """Open a manifest, creating it if need be.

    A manifest that cannot be written, as on a read-only mount or a full disk, is opened as an immutable file: changes
    that others make meanwhile may not be seen.

    Args:
        path: its file, or None for a manifest in memory.

    Raises:
        OSError: if its file cannot be created.
        sqlite3.Error: if it cannot be opened.
    """
    if path is None:
        database = _connect(":memory:")
        database.executescript(SCHEMA)
        return OpenManifest(database, database, writable=True)
    try:
        database = _connect(str(path))
        path.chmod(0o600)
        _use_write_ahead_log(database)
        _add_missing_columns(database)
        database.executescript(SCHEMA)
    except (sqlite3.OperationalError, OSError) as error:
        full = any(message in str(error) for message in DISK_FULL_MESSAGES)
        if not path.exists() or (os.access(path.parent, os.W_OK) and not full):
            raise
        immutable = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        database = _connect(immutable)
        try:
            database.execute(f"SELECT 1 FROM {LAST_TABLE} LIMIT 1")
        except sqlite3.Error:
            raise error from None
        return OpenManifest(database, _connect(immutable), writable=False)
    reader = _connect(str(path), timeout=1)
    reader.execute("PRAGMA query_only = 1")
    return OpenManifest(database, reader, writable=True)


def manifest_damage(folder: Path) -> str | None:
    """Return what is wrong with a store's manifest; None if it is sound or does not exist."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(path)) as database:
            [(result,)] = database.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.OperationalError:  # busy or not readable: nothing that a rebuild would repair
        return None
    except (sqlite3.DatabaseError, OSError) as error:
        result = str(error)
    return None if result == "ok" else f"{path}: {result}; `qcfuse store rebuild` moves it aside; then warm again"


def quarantine_manifest(folder: Path) -> Path | None:
    """Rename a damaged manifest, so that the next process creates a new one; return the new path.

    The new manifest learns which documents have which chunks when they are warmed again. Until then they cannot be
    forgotten by name.
    """
    if manifest_damage(folder) is None:
        return None
    path = folder / FILE_NAME
    renamed = path.with_name(f"{path.name}.damaged")
    path.replace(renamed)
    for ending in ("-wal", "-shm"):
        beside = path.with_name(path.name + ending)
        beside.unlink(missing_ok=True)
    return renamed


def _fetch(database: sqlite3.Connection, statement: str, values: tuple[str | int, ...]) -> list[tuple[Any, ...]]:
    try:
        return database.execute(statement, values).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"cannot read the manifest of sources: {error}") from error


def _connect(path: str, *, timeout: float = WRITE_TIMEOUT_S) -> sqlite3.Connection:
    database = sqlite3.connect(
        path, timeout=timeout, isolation_level=None, check_same_thread=False, uri=path.startswith("file:")
    )
    database.execute("PRAGMA secure_delete = ON")  # removed names must not stay in free pages
    return database


def _use_write_ahead_log(database: sqlite3.Connection) -> None:
    """Switch to a write-ahead log, retrying: SQLite itself does not wait for other processes that open the file."""
    deadline = time.monotonic() + OPEN_TIMEOUT_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _add_missing_columns(database: sqlite3.Connection) -> None:
    """Add the columns that manifests of earlier versions lack; warming again fills in the passages."""
    for table, column in COLUMNS_ADDED:
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        if columns and column.split()[0] not in columns:
            database.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
