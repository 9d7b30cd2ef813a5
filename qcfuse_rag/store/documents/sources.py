"""Which document's passages are in the store, so that a changed or deleted document takes its caches with it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from qcfuse_rag.errors import StoreError
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.documents import acl as access
from qcfuse_rag.store.documents.manifest import opened
from qcfuse_rag.store.key import ChunkKey

REMEMBERED = 100_000
"""Removed addresses that are kept for processes which hold their chunks in memory, and lost passages for jobs."""

WANTED = """
SELECT 1 FROM chunks WHERE address = ?1 AND NOT EXISTS (SELECT 1 FROM unwanted WHERE address = ?1 AND by_origin)
"""
NOBODYS = """
INSERT OR IGNORE INTO unwanted SELECT ?1, 0 WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE address = ?1)
"""
MADE_OF_NOBODYS = """
INSERT OR REPLACE INTO unwanted SELECT address, 1 FROM derived
WHERE origin = ?1 AND NOT EXISTS (SELECT 1 FROM chunks WHERE passage = ?1)
"""
MADE_OF_LOST = """
INSERT OR REPLACE INTO unwanted SELECT ?1, 1
WHERE EXISTS (SELECT 1 FROM lost WHERE number > ?2 AND passage IN (SELECT origin FROM derived WHERE address = ?1))
"""
STILL_WANTED = """
SELECT 1 FROM derived WHERE address = ?1 AND NOT EXISTS (SELECT 1 FROM unwanted WHERE address = ?1) LIMIT 1
"""
LOST = """
INSERT INTO lost (passage) SELECT ?1 WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE passage = ?1)
"""


class Sources:
    """Counts, for every stored chunk, the sources that use it: equal passages of two documents share one entry.

    Kept in `sources.db` in the store's folder, or in memory beside a store that lives there. A chunk whose last source
    is gone is removed from all tiers, pinned or not; if the process dies in between, `collect` finishes. What was made
    of several passages, as a cache born behind others is, goes when one of them loses its last source, even if a source
    has it. Chunks that never had a source, such as the prompt's fixed head, are left alone.

    Args:
        store: whose chunks; not closed with this.

    Raises:
        StoreError: if the manifest cannot be opened.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._own = store.prefix  # tenants have sources of their own
        self._process = os.getpid()
        self._place = None if store.folder is None else store.folder / "sources.db"
        self._lock = threading.Lock()
        self._reading = self._lock if self._place is None else threading.Lock()
        self._open()

    def replace(self, source: str, keys: Iterable[ChunkKey]) -> int:
        """Say which chunks a source has now; return how many it had alone and that are removed.

        What it has under another model, base or wording of the prompt stays, as long as these keys are of one of them
        at all: two models may share a store.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        return self._change(source, keys, replace=True)

    def add(self, source: str, keys: Iterable[ChunkKey]) -> None:
        """Say that a source has these chunks too.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        self._change(source, keys, replace=False)

    def restrict(self, source: str, tag: str | None) -> int:
        """Say who may read a source, before its chunks are added or after; see `store.documents.acl`.

        Returns:
            How many entries were removed because they remember something that not all their readers may see.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        name = self._own + source
        with self.writing() as database:
            access.give_tag(database, name, tag)
            rows = database.execute("SELECT DISTINCT passage FROM chunks WHERE source = ?", (name,)).fetchall()
            access.note_overstepping(database, [row[0] for row in rows])
        return self.collect()

    @property
    def restricted(self) -> bool:
        """Whether there is a source that not everybody may read."""
        with self._lock:
            return bool(self._rows("SELECT 1 FROM access WHERE source GLOB ? LIMIT 1", f"{self._own}*"))

    def readers(self, key: ChunkKey) -> frozenset[str]:
        """Return the tags of those who may read a passage, given any of its keys; none if no source has it."""
        with self._lock:
            rows = self._rows("SELECT tag FROM readers WHERE passage = ?", self.passage(key))
        return frozenset(row[0] for row in rows)

    def made_of(self, key: ChunkKey) -> frozenset[str]:
        """Return which passages an entry was made of, as `passage` names them."""
        with self._lock:
            rows = self._rows("SELECT origin FROM derived WHERE address = ?", self._store.address(key))
        return frozenset(row[0] for row in rows)

    @property
    def losses(self) -> int:
        """How many times a passage lost its last source; for `derive`."""
        with self._lock:
            [(count,)] = self._rows("SELECT coalesce(max(number), 0) FROM lost")
        return int(count)

    def derive(self, key: ChunkKey, origins: Iterable[ChunkKey], *, since: int | None = None) -> None:
        """Say which passages an entry was made of, instead of what was said before.

        It is removed when one of them loses its last source, whether the entry has a source itself or not: what it
        remembers of that passage is not the source's.

        Args:
            key: of the entry, about to be written anew.
            origins: a key of each passage, under any base.
            since: what `losses` was when they were chosen; the entry is not wanted if one has been lost since.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        address = self._store.address(key)
        rows = [(address, origin, self.passage(key)) for origin in {self.passage(one) for one in origins}]
        with self.writing() as database:
            database.execute("DELETE FROM derived WHERE address = ?", (address,))
            database.executemany("INSERT INTO derived VALUES (?, ?, ?)", rows)
            database.execute("DELETE FROM unwanted WHERE address = ?", (address,))
            if since is not None:
                database.execute(MADE_OF_LOST, (address, since))
            access.note_overstepping(database, [self.passage(key)])

    def confirm(self, key: ChunkKey) -> bool:
        """Return whether an entry that was just written may stay; see `derive`.

        `collect` forgets what an entry is made of when it has removed it. One that is written only after that, since it
        was being computed, would never be found again: it is removed here.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        address = self._store.address(key)
        with self.writing():  # not while somebody is removing it
            wanted = bool(self._rows(STILL_WANTED, address))
            if not wanted:
                self._store.discard(address)
        return wanted

    def remove(self, source: str, keys: Iterable[ChunkKey | str]) -> int:
        """Say that a source no longer has these chunks; return how many it had alone and that are removed.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        with self.writing() as database:
            self._drop(database, self._own + source, [self._store.address(key) for key in keys])
        return self.collect()

    def forget(self, source: str) -> int:
        """Remove a source, under every model and wording; return how many chunks it had alone and that are removed.

        Who may read it is kept: a document that is updated by deleting and adding it stays what it was. See `restrict`.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        return self.remove(source, self.addresses(source))

    def collect(self) -> int:
        """Remove chunks that lost their last source and are still there; return how many."""
        with self._lock:
            rows = self._rows("SELECT address FROM unwanted")
        removed = 0
        for address in [row[0] for row in rows if row[0].startswith(self._own)]:
            with self.writing() as database:  # so that nobody takes the chunk up again while it is removed
                wanted = bool(self._rows(WANTED, address))
                if not wanted:
                    removed += self._store.discard(address)
                # A remote that is away is not one without the entry: that stays noted.
                left = None if wanted else self._store.open(address)
                gone = isinstance(left, Miss) and left.reason in ("absent", "expired")
                if gone:
                    database.execute("INSERT INTO gone (address) VALUES (?)", (address,))
                    database.execute("DELETE FROM gone WHERE number <= last_insert_rowid() - ?", (REMEMBERED,))
                if wanted or gone:
                    database.execute("DELETE FROM unwanted WHERE address = ?", (address,))
                if gone:
                    database.execute("DELETE FROM derived WHERE address = ?", (address,))
        return removed

    def gone_since(self, number: int | None) -> tuple[int, list[str]]:
        """Return a number to ask with again, and the addresses removed for good since the last one; None asks for it.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        if number is None:
            [(last,)] = self.read("SELECT coalesce(max(number), 0) FROM gone")
            return last, []
        rows = self.read("SELECT number, address FROM gone WHERE number > ? ORDER BY number", number)
        return rows[-1][0] if rows else number, [address for _, address in rows]

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that opened the file, which SQLite does not share so."""
        return self._store.folder is not None and self._process != os.getpid()

    @property
    def unwanted(self) -> int:
        """How many chunks lost their last source and could not be removed yet, as from a remote that is away."""
        with self._lock:
            rows = self._rows("SELECT address FROM unwanted")
        return sum(row[0].startswith(self._own) for row in rows)

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
        with self._lock, nullcontext() if self._reading is self._lock else self._reading:
            self._database.close()
            self._reader.close()

    def _open(self) -> None:
        try:
            self._database, self._reader, self._writable = opened(self._place)
        except (sqlite3.Error, OSError) as error:
            hint = "; `qcfuse store rebuild` puts it aside, warm again then" if "not a database" in str(error) else ""
            raise StoreError(f"cannot open {self._place}: {error}{hint}") from error

    def _change(self, source: str, keys: Iterable[ChunkKey], *, replace: bool) -> int:
        wanted = {self._store.address(key): key for key in keys}
        name, wordings = self._own + source, {_wording(key) for key in wanted.values()}
        rows = [(name, address, _wording(key), self.passage(key)) for address, key in wanted.items()]
        # A manifest that cannot be written need not be, and who looks at `version` would take writing for a change.
        if self._said(name, rows, alone=replace):
            return self.collect()
        with self.writing() as database:
            database.executemany("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?)", rows)
            taken_up = [(address,) for address in wanted]
            database.executemany("DELETE FROM unwanted WHERE address = ? AND NOT by_origin", taken_up)
            had = database.execute("SELECT address, wording FROM chunks WHERE source = ?", (name,)).fetchall()
            stale = [address for address, wording in had if wording in wordings and address not in wanted]
            if replace:
                self._drop(database, name, stale)
            access.note_overstepping(database, {row[3] for row in rows})
        return self.collect()

    def _said(self, name: str, rows: Sequence[tuple[str, str, str, str]], *, alone: bool) -> bool:
        """Return whether a source is known to have these chunks; `alone`, if no others of their wordings."""
        with self._lock:
            had = self._rows("SELECT source, address, wording, passage FROM chunks WHERE source = ?", name)
            unwanted = self._rows("SELECT address FROM unwanted WHERE NOT by_origin")
        wordings = {wording for _, _, wording, _ in rows}
        more = alone and any(row[2] in wordings for row in set(had) - set(rows))
        return not more and set(rows) <= set(had) and not {row[1] for row in rows} & {row[0] for row in unwanted}

    def _drop(self, database: sqlite3.Connection, name: str, addresses: Iterable[str]) -> None:
        """Take chunks from a source, as far as they are its own, and note those that are nobody's now."""
        statement = "SELECT address, passage FROM chunks WHERE source = ?"
        had = dict(database.execute(statement, (name,)).fetchall())
        gone = [address for address in addresses if address in had]
        rows = [(name, address) for address in gone]
        database.executemany("DELETE FROM chunks WHERE source = ? AND address = ?", rows)
        database.executemany(NOBODYS, [(address,) for address in gone])
        lost = {had[address] for address in gone}
        database.executemany(MADE_OF_NOBODYS, [(passage,) for passage in lost])
        database.executemany(LOST, [(passage,) for passage in lost])
        database.execute("DELETE FROM lost WHERE number <= (SELECT max(number) FROM lost) - ?", (REMEMBERED,))
        access.note_overstepping(database, lost)  # those left may be fewer readers

    def passage(self, key: ChunkKey) -> str:
        """Return what stands for a passage under whatever base it is stored; as hard to guess as its address."""
        return self._store.address(replace(key, base="", prefix=""))

    @property
    def version(self) -> tuple[int, int]:
        """What changes whenever somebody has written to the manifest, in this process or another."""
        [(version,)] = self.read("PRAGMA data_version")
        return version, self._reader.total_changes

    def read(self, statement: str, *values: str | int) -> list[tuple[Any, ...]]:
        """Return the rows of a query.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        with self._reading:
            try:
                return self._reader.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"cannot read the manifest of sources: {error}") from error

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Change the manifest: all of it or, if anything is raised, nothing.

        Raises:
            StoreError: if it cannot be written.
        """
        with self._lock:
            if not self._writable:  # by now there may be room
                with self._reading:
                    self._open()
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

    def _rows(self, statement: str, *values: str | int) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"cannot read the manifest of sources: {error}") from error


def _wording(key: ChunkKey) -> str:
    """Return what a key has in common with those of other passages for the same model, base and head."""
    return digest(f"{key.fingerprint.digest} {key.base} {key.prefix}".encode())
