"""Which document's passages are in the store, so that a changed or deleted document takes its caches with it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from qcfuse_rag.errors import StoreError
from qcfuse_rag.model.fingerprint import digest
from qcfuse_rag.store.contract import KVStore, Miss
from qcfuse_rag.store.key import ChunkKey

SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (
    source TEXT, address TEXT, wording TEXT, PRIMARY KEY (source, address)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chunks_by_address ON chunks (address);
CREATE TABLE IF NOT EXISTS unwanted (address TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS derived (address TEXT, origin TEXT, PRIMARY KEY (address, origin)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS derived_by_origin ON derived (origin);
"""


class Sources:
    """Counts, for every stored chunk, the sources that use it: equal passages of two documents share one entry.

    Kept in `sources.db` in the store's folder, or in memory beside a store that lives there. A chunk whose last source
    is gone is removed from all tiers, pinned or not; if the process dies in between, `collect` finishes. What was made
    of several chunks, as a cache born behind others is, goes when one of them loses its last source. Chunks that never
    had a source, such as the prompt's fixed head, are left alone.

    Args:
        store: whose chunks; not closed with this.

    Raises:
        StoreError: if the manifest cannot be opened.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._own = store.prefix  # tenants have sources of their own
        place = ":memory:" if store.folder is None else str(store.folder / "sources.db")
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(place, timeout=60, isolation_level=None, check_same_thread=False)
            if store.folder is not None:
                (store.folder / "sources.db").chmod(0o600)
                self._database.execute("PRAGMA journal_mode = WAL")
            self._database.executescript(SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"cannot open {place}: {error}") from error

    def replace(self, source: str, keys: Iterable[ChunkKey]) -> int:
        """Say which chunks a source has now; return how many it had alone and that are removed.

        What it has under another model, base or wording of the prompt stays, as long as these keys are of one of them
        at all: two models may share a store.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        return self._change(source, {self._store.address(key): _wording(key) for key in keys}, replace=True)

    def add(self, source: str, keys: Iterable[ChunkKey]) -> None:
        """Say that a source has these chunks too.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        self._change(source, {self._store.address(key): _wording(key) for key in keys}, replace=False)

    def derive(self, key: ChunkKey, origins: Iterable[ChunkKey]) -> None:
        """Say which chunks an entry was made of, instead of what was said before.

        It is removed when one of them loses its last source, unless it has a source itself.

        Args:
            key: of the entry.
            origins: keys of the chunks; under several bases, where it is not known which of them has a source.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        address = self._store.address(key)
        rows = [(address, origin) for origin in {self._store.address(one) for one in origins} - {address}]
        with self._writing() as database:
            database.execute("DELETE FROM derived WHERE address = ?", (address,))
            database.executemany("INSERT INTO derived VALUES (?, ?)", rows)
            database.execute("DELETE FROM unwanted WHERE address = ?", (address,))

    def remove(self, source: str, keys: Iterable[ChunkKey | str]) -> int:
        """Say that a source no longer has these chunks; return how many it had alone and that are removed.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        with self._writing() as database:
            self._drop(database, self._own + source, [self._store.address(key) for key in keys])
        return self.collect()

    def forget(self, source: str) -> int:
        """Remove a source, under every model and wording; return how many chunks it had alone and that are removed.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        return self.remove(source, self.addresses(source))

    def collect(self) -> int:
        """Remove chunks that lost their last source and are still there; return how many."""
        with self._lock:
            unwanted = [row[0] for row in self._rows("SELECT address FROM unwanted") if row[0].startswith(self._own)]
        removed = 0
        for address in unwanted:
            with self._writing() as database:  # so that nobody takes the chunk up again while it is removed
                wanted = bool(self._rows("SELECT 1 FROM chunks WHERE address = ?", address))
                if not wanted:
                    removed += self._store.discard(address)
                # A remote that is away is not one without the entry: that stays noted.
                left = None if wanted else self._store.open(address)
                gone = isinstance(left, Miss) and left.reason in ("absent", "expired")
                if wanted or gone:
                    database.execute("DELETE FROM unwanted WHERE address = ?", (address,))
                if gone:
                    database.execute("DELETE FROM derived WHERE address = ?", (address,))
        return removed

    def names(self) -> list[str]:
        """Return the sources, in order."""
        start = len(self._own)
        with self._lock:
            rows = self._rows("SELECT DISTINCT source FROM chunks ORDER BY source")
        return [row[0][start:] for row in rows if row[0].startswith(self._own)]

    def addresses(self, source: str) -> set[str]:
        """Return the addresses of a source's chunks, whether they are in the store or have been evicted."""
        with self._lock:
            return {row[0] for row in self._rows("SELECT address FROM chunks WHERE source = ?", self._own + source)}

    def missing(self) -> dict[str, int]:
        """Return, by source, how many of its chunks are not in the store; what evictions or a failing disk took."""
        counts = {name: sum(a not in self._store for a in self.addresses(name)) for name in self.names()}
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        """Close the manifest."""
        with self._lock:
            self._database.close()

    def _change(self, source: str, wanted: dict[str, str], *, replace: bool) -> int:
        name, wordings = self._own + source, set(wanted.values())
        with self._writing() as database:
            rows = [(name, address, wording) for address, wording in wanted.items()]
            database.executemany("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?)", rows)
            database.executemany("DELETE FROM unwanted WHERE address = ?", [(address,) for address in wanted])
            had = database.execute("SELECT address, wording FROM chunks WHERE source = ?", (name,)).fetchall()
            stale = [address for address, wording in had if wording in wordings and address not in wanted]
            if replace:
                self._drop(database, name, stale)
        return self.collect() if replace else 0

    def _drop(self, database: sqlite3.Connection, name: str, addresses: Iterable[str]) -> None:
        """Take chunks from a source, as far as they are its own, and note those that are nobody's now."""
        had = {row[0] for row in self._rows("SELECT address FROM chunks WHERE source = ?", name)}
        gone = [(address,) for address in addresses if address in had]
        rows = [(name, *address) for address in gone]
        database.executemany("DELETE FROM chunks WHERE source = ? AND address = ?", rows)
        nobodys = "SELECT ?1 WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE address = ?1)"
        database.executemany(f"INSERT OR IGNORE INTO unwanted {nobodys}", gone)
        made = "SELECT address FROM derived WHERE origin = ?1 AND NOT EXISTS (SELECT 1 FROM chunks WHERE address = ?1)"
        database.executemany(f"INSERT OR IGNORE INTO unwanted {made}", gone)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    yield self._database
                except BaseException:
                    self._database.execute("ROLLBACK")
                    raise
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreError(f"cannot write the manifest of sources: {error}") from error

    def _rows(self, statement: str, *values: str) -> list[tuple[str]]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"cannot read the manifest of sources: {error}") from error


def _wording(key: ChunkKey) -> str:
    """Return what a key has in common with those of other passages for the same model, base and head."""
    return digest(f"{key.fingerprint.digest} {key.base} {key.prefix}".encode())
