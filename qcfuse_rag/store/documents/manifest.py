"""The file in which a store's sources are kept: a database beside the entries."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from qcfuse_rag.store.documents import acl as access

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
"""

SIGNATURES_SCHEMA = """
CREATE TABLE IF NOT EXISTS located (
    name TEXT, anchor INTEGER, atoms INTEGER, gaps BLOB, passage TEXT, PRIMARY KEY (name, passage)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS located_by_anchor ON located (anchor);
CREATE INDEX IF NOT EXISTS located_by_passage ON located (passage);
CREATE TRIGGER IF NOT EXISTS no_longer_located AFTER DELETE ON chunks
WHEN NOT EXISTS (SELECT 1 FROM chunks WHERE passage = OLD.passage)
BEGIN DELETE FROM located WHERE passage = OLD.passage; END;
"""

TABLES = SCHEMA + access.SCHEMA + SIGNATURES_SCHEMA

OPENING_S = 10.0
"""Seconds to wait for others who open the manifest at the same time."""

FULL = ("disk is full", "disk I/O error", "No space left")
"""How SQLite and the system say that nothing more can be written."""


class Opened(NamedTuple):
    """A manifest that is open.

    Attributes:
        database: to change it by.
        reader: to read it by beside whoever removes chunks, which may take as long as a remote takes; the same for one
            in memory.
        writable: whether it can be changed.
    """

    database: sqlite3.Connection
    reader: sqlite3.Connection
    writable: bool


def opened(place: Path | None) -> Opened:
    """Open a manifest.

    One that cannot be written, as on a read-only mount or a full disk, is read as it lies there: what others change in
    it meanwhile may not be seen.

    Args:
        place: its file, or None for one in memory.

    Raises:
        OSError: if its file cannot be made.
        sqlite3.Error: if it cannot be opened.
    """
    if place is None:
        database = _connected(":memory:")
        database.executescript(TABLES)
        return Opened(database, database, writable=True)
    try:
        database = _connected(str(place))
        place.chmod(0o600)
        _write_ahead(database)
        _bring_up_to_date(database)
        database.executescript(TABLES)
    except (sqlite3.OperationalError, OSError) as error:
        full = any(reason in str(error) for reason in FULL)
        if not place.exists() or (os.access(place.parent, os.W_OK) and not full):
            raise
        unchanged = f"{place.absolute().as_uri()}?mode=ro&immutable=1"
        database = _connected(unchanged)
        try:
            database.execute("SELECT 1 FROM located LIMIT 1")  # the last table that is made
        except sqlite3.Error:
            raise error from None
        return Opened(database, _connected(unchanged), writable=False)
    reader = _connected(str(place), timeout=1)
    reader.execute("PRAGMA query_only = 1")
    return Opened(database, reader, writable=True)


def _connected(place: str, *, timeout: float = 60) -> sqlite3.Connection:
    return sqlite3.connect(
        place, timeout=timeout, isolation_level=None, check_same_thread=False, uri=place.startswith("file:")
    )


def _write_ahead(database: sqlite3.Connection) -> None:
    """Switch to a write-ahead log; SQLite does not wait for others who open the file at the same time, so this does."""
    until = time.monotonic() + OPENING_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _bring_up_to_date(database: sqlite3.Connection) -> None:
    """Add what manifests of earlier versions lack; which passage a chunk is, they learn when it is warmed again."""
    added = (("chunks", "passage TEXT"), ("unwanted", "by_origin INTEGER DEFAULT 0"), ("derived", "passage TEXT"))
    for table, column in added:
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        if columns and column.split()[0] not in columns:
            database.execute(f"ALTER TABLE {table} ADD COLUMN {column}")


def damage_of(folder: Path) -> str | None:
    """Return what is wrong with a store's manifest; None if nothing is, or there is none."""
    place = folder / "sources.db"
    if not place.exists():
        return None
    try:
        with closing(sqlite3.connect(place)) as database:
            [(found,)] = database.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.OperationalError:  # busy, or not to be opened: nothing that would be mended
        return None
    except sqlite3.DatabaseError as error:
        found = str(error)
    return None if found == "ok" else f"{place}: {found}; `qcfuse store rebuild` puts it aside, warm again then"


def put_aside(folder: Path) -> Path | None:
    """Put a damaged manifest aside, so that the next one to open it makes it anew; return where it is.

    What documents have which chunks is learnt again when they are warmed; until then they cannot be forgotten by name.
    """
    if damage_of(folder) is None:
        return None
    place = folder / "sources.db"
    aside = place.with_name(f"{place.name}.damaged")
    place.replace(aside)
    for ending in ("-wal", "-shm"):
        place.with_name(place.name + ending).unlink(missing_ok=True)
    return aside
