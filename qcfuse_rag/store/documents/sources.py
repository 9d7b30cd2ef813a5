"""Record which documents have which passages in the store, so that a changed or deleted document takes them along.

An entry that was computed behind other passages carries something of them: it goes when one of them loses its last
source. Entries that nobody wants any more are marked in the manifest, then removed from all tiers.

The manifest is `sources.db` beside the entries. `chunks` says which source has which entry; `passage` names a passage
under whatever base it is stored. `derived` says which passages (`origin`) an entry was computed from. `unwanted` lists
the entries to remove, `gone` those removed, `lost` the passages that lost their last source. `access` holds the tags of
restricted sources, `recognised` what passages are recognised by in a text (`PassageRows`).

Access control: no cache carries a passage that a reader of the cache's own text must not see. An enriched or captured
cache carries something of the passages it was prefilled behind, so it may be built on another passage only if everybody
who may read its own may read that one too. Access belongs to documents: a tag, or none for everybody. The readers of a
passage that two documents have are those of both. Once any document has a tag, nothing is built on a passage without a
document: it may be a restricted text under another model.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from qcfuse_rag.errors import StoreError
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.backends.files import ADDRESS
from qcfuse_rag.store.key import ChunkKey

EVERYBODY = ""
"""The tag of documents without one."""


def may_be_built_on(readers: frozenset[str], origin_readers: frozenset[str]) -> bool:
    """Return whether a cache may be prefilled behind its origin; a passage without document has no known readers."""
    return EVERYBODY in origin_readers or (bool(readers) and readers <= origin_readers)


def tags_of(pieces: Iterable[tuple[str | None, Mapping[str, Any]]], key: str | None) -> dict[str, str | None] | None:
    """Return the access tag of each source from the metadata of its pieces, for `FusionEngine.warm`.

    A source has the tag that any of its pieces has. A source of which no piece has the key is left out, so that it
    keeps its tag; a key with an empty value opens a source to everybody.

    Raises:
        ValueError: if pieces of one source have different tags.
    """
    if key is None:
        return None
    tags: dict[str, str | None] = {}
    for source, metadata in pieces:
        if source is None or key not in metadata:
            continue
        tag = None if metadata[key] in (None, EVERYBODY) else str(metadata[key])
        previous = tags.get(source)
        if tag and previous and tag != previous:
            raise ValueError(f"pieces of one document have different tags under {key!r}; give all of them the same")
        tags[source] = tag or previous
    return tags


def mark_acl_violations(database: sqlite3.Connection, passages: Iterable[str]) -> None:
    """Mark entries as unwanted that `may_be_built_on` forbids now."""

    def readers(passage: str) -> frozenset[str]:
        return frozenset(tag for (tag,) in database.execute(READERS, (passage,)))

    if database.execute("SELECT 1 FROM access LIMIT 1").fetchone():
        for changed in passages:
            for address, passage, origin in database.execute(DERIVED_WITH, (changed,)).fetchall():
                if not may_be_built_on(readers(passage), readers(origin)):
                    database.execute("INSERT OR REPLACE INTO unwanted VALUES (?, 1)", (address,))


READERS = "SELECT tag FROM readers WHERE passage = ?"
DERIVED_WITH = "SELECT address, passage, origin FROM derived WHERE passage = ?1 OR origin = ?1"

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

DROP TRIGGER IF EXISTS no_longer_located;
DROP TABLE IF EXISTS located;
CREATE TABLE IF NOT EXISTS recognised (
    number INTEGER PRIMARY KEY AUTOINCREMENT, passage TEXT UNIQUE, owner INTEGER, ids BLOB, blocks BLOB, gaps BLOB
);
CREATE TRIGGER IF NOT EXISTS no_longer_recognised AFTER DELETE ON chunks
WHEN NOT EXISTS (SELECT 1 FROM chunks WHERE passage = OLD.passage)
BEGIN DELETE FROM recognised WHERE passage = OLD.passage; END;
"""

JOURNAL_ROWS = 100_000
"""Most rows of `gone`, for processes that hold chunks in memory, and of `lost`, for running jobs."""

FILE_NAME = "sources.db"

WRITE_TIMEOUT_S = 60
OPEN_TIMEOUT_S = 10.0
"""Seconds to wait for other processes that open the manifest at the same time."""

DISK_FULL_MESSAGES = ("disk is full", "disk I/O error", "No space left")
"""Parts of the messages with which SQLite and the system say that nothing more can be written."""


class Manifest:
    """The open manifest in a store's folder, or in memory. Safe to use from several threads.

    Every method raises `StoreError` if the manifest cannot be opened, read or written.
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

    @property
    def replaced(self) -> bool:
        """Whether the open file was removed from its folder, or another one is in its place."""
        with suppress(FileNotFoundError):
            return self._path is not None and self._path.stat().st_ino != self._inode
        return self._path is not None and self._path.parent.exists()  # else there is no folder for another one

    def version(self) -> tuple[int, int]:
        """Return a value that changes whenever this or another process has written to the manifest."""
        [(version,)] = self.read("PRAGMA data_version")
        return version, self._reader.total_changes

    def read(self, statement: str, *values: str | int) -> list[tuple[Any, ...]]:
        """Return the rows of a query as last committed, without waiting for changes being made."""
        try:
            with self._reader_lock:
                return self._reader.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"cannot read the manifest of sources: {error}") from error

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Change the manifest in one transaction, which is rolled back if anything is raised."""
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
            self._database, self._reader, self._writable = _open_manifest(self._path)
            self._inode = 0 if self._path is None else self._path.stat().st_ino
        except (sqlite3.Error, OSError) as error:
            hint = "; `qcfuse store rebuild` moves it aside; then warm again" * ("not a database" in str(error))
            raise StoreError(f"cannot open {self._path}: {error}{hint}") from error


def _open_manifest(path: Path | None) -> tuple[sqlite3.Connection, sqlite3.Connection, bool]:
    """Return connections for changes and for reading meanwhile, and whether the manifest can be changed.

    A change may take as long as a remote takes. A manifest that cannot be written, as on a read-only mount or a full
    disk, is opened as an immutable file: changes that others make meanwhile may not be seen.
    """
    if path is None:
        database = _connect(":memory:")
        database.executescript(SCHEMA)
        return database, database, True
    try:
        database = _connect(str(path))
        path.chmod(0o600)
        _use_write_ahead_log(database)
        database.executescript(SCHEMA)
    except (sqlite3.OperationalError, OSError) as error:
        full = any(message in str(error) for message in DISK_FULL_MESSAGES)
        if not path.exists() or (os.access(path.parent, os.W_OK) and not full):
            raise
        immutable = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        database = _connect(immutable)
        try:
            database.execute("SELECT 1 FROM chunks LIMIT 1")  # one of before has no `recognised`
        except sqlite3.Error:
            raise error from None
        return database, _connect(immutable), False
    reader = _connect(str(path), timeout=1)
    reader.execute("PRAGMA query_only = 1")
    return database, reader, True


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


MARK_IF_ORIGIN_LOST_SINCE = """
INSERT OR REPLACE INTO unwanted SELECT ?1, 1
WHERE EXISTS (SELECT 1 FROM lost WHERE number > ?2 AND passage IN (SELECT origin FROM derived WHERE address = ?1))
"""
IS_UNMARKED = """
SELECT 1 FROM derived WHERE address = ?1 AND NOT EXISTS (SELECT 1 FROM unwanted WHERE address = ?1) LIMIT 1
"""


class Derivations:
    """The origins of a store's entries: the passages that each was computed from."""

    def __init__(self, manifest: Manifest, store: KVStore) -> None:
        self._manifest, self._store = manifest, store

    def set_origins(self, key: ChunkKey, origins: Iterable[ChunkKey], *, since: int) -> None:
        """Record the origins of an entry that is about to be written, replacing those recorded before."""
        address, passage = self._store.address(key), self._store.address(key.passage_key())
        names = {self._store.address(origin.passage_key()) for origin in origins}
        with self._manifest.writing() as database:
            database.execute("DELETE FROM derived WHERE address = ?", (address,))
            database.executemany("INSERT INTO derived VALUES (?, ?, ?)", [(address, name, passage) for name in names])
            marked = database.execute("SELECT 1 FROM unwanted WHERE address = ? AND by_origin", (address,)).fetchone()
            # A remote that cannot be reached may still have the entry of before: it stays marked, and the new entry
            # is dropped until the remote answers.
            if not marked or is_gone(self._store, address):
                database.execute("DELETE FROM unwanted WHERE address = ?", (address,))
            database.execute(MARK_IF_ORIGIN_LOST_SINCE, (address, since))
            mark_acl_violations(database, [passage])

    def keep_if_wanted(self, key: ChunkKey) -> bool:
        """Remove an entry that was just written if it is unwanted by now; return whether it stays.

        This closes a race: if an origin was removed while the entry was being computed, `Garbage.collect` has already
        forgotten the entry's origins and would never remove it.
        """
        address = self._store.address(key)
        with self._manifest.writing() as database:  # not while another process removes it
            wanted = bool(database.execute(IS_UNMARKED, (address,)).fetchone())
            if not wanted:
                self._store.discard(address)
        return wanted

    def origins(self, key: ChunkKey) -> frozenset[str]:
        """Return the passages an entry was computed from, as `Sources.passage_id` names them."""
        rows = self._manifest.read("SELECT origin FROM derived WHERE address = ?", self._store.address(key))
        return frozenset(origin for (origin,) in rows)

    def loss_count(self) -> int:
        """Return how many times a passage lost its last source; see `set_origins`."""
        [(count,)] = self._manifest.read("SELECT coalesce(max(number), 0) FROM lost")
        return int(count)


IS_WANTED = """
SELECT 1 FROM chunks WHERE address = ?1 AND NOT EXISTS (SELECT 1 FROM unwanted WHERE address = ?1 AND by_origin)
"""
MARK_IF_NO_SOURCE = """
INSERT OR IGNORE INTO unwanted SELECT ?1, 0 WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE address = ?1)
"""
MARK_DERIVED_IF_ORIGIN_LOST = """
INSERT OR REPLACE INTO unwanted SELECT address, 1 FROM derived
WHERE origin = ?1 AND NOT EXISTS (SELECT 1 FROM chunks WHERE passage = ?1)
"""
OWNERLESS = """
SELECT DISTINCT address FROM gone
WHERE address NOT IN (SELECT address FROM chunks) AND address NOT IN (SELECT address FROM derived)
"""
RECORD_IF_LOST = """
INSERT INTO lost (passage) SELECT ?1 WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE passage = ?1)
"""


class Garbage:
    """The entries of a store that are marked unwanted in its manifest."""

    def __init__(self, manifest: Manifest, store: KVStore) -> None:
        self._manifest, self._store = manifest, store

    def collect(self) -> int:
        """Remove unwanted entries from all tiers; return how many were removed."""
        removed = 0
        for address in self._addresses():
            # In a transaction, so that no source takes the entry up again while it is removed.
            with self._manifest.writing() as database:
                wanted = bool(database.execute(IS_WANTED, (address,)).fetchone())
                discarded = not wanted and self._store.discard(address)
                removed += discarded
                gone = not wanted and is_gone(self._store, address)
                # Other processes drop it from memory even while an unreachable remote, which may have it, keeps it
                # marked.
                if discarded or gone:
                    database.execute("INSERT INTO gone (address) VALUES (?)", (address,))
                    database.execute("DELETE FROM gone WHERE number <= last_insert_rowid() - ?", (JOURNAL_ROWS,))
                if wanted or gone:
                    database.execute("DELETE FROM unwanted WHERE address = ?", (address,))
                if gone:
                    database.execute("DELETE FROM derived WHERE address = ?", (address,))
        return removed

    def ownerless(self) -> list[str]:
        """Return the addresses of stored entries that were removed with their last source and came back without one.

        A job that was killed while another process forgot its document leaves such entries.
        """
        return [a for a in _known(self._manifest.read(OWNERLESS), self._store.prefix) if a in self._store]

    def collect_ownerless(self) -> int:
        """Remove the `ownerless` entries from all tiers; return how many were removed."""
        addresses = self.ownerless()
        if addresses:
            with self._manifest.writing() as database:
                mark_without_source(database, addresses)
        return self.collect()

    def count(self) -> int:
        """Return how many entries could not be removed yet, such as those of an unreachable remote."""
        return len(self._addresses())

    def removed_since(self, number: int | None) -> tuple[int, list[str]]:
        """Return a number for the next call, and the addresses removed since the call that returned this number."""
        if number is None:
            [(last,)] = self._manifest.read("SELECT coalesce(max(number), 0) FROM gone")
            return last, []
        rows = self._manifest.read("SELECT number, address FROM gone WHERE number > ? ORDER BY number", number)
        return rows[-1][0] if rows else number, _known(row[1:] for row in rows)

    def _addresses(self) -> list[str]:
        return _known(self._manifest.read("SELECT address FROM unwanted"), self._store.prefix)


def _known(rows: Iterable[tuple[Any, ...]], prefix: str = "") -> list[str]:
    """Return the addresses with a prefix in rows of one column; whoever writes to the folder may have put others in."""
    return [a for (a,) in rows if isinstance(a, str) and ADDRESS.fullmatch(a) and a.startswith(prefix)]


def is_gone(store: KVStore, address: str) -> bool:
    """Return whether no tier has an entry; a tier that cannot be reached may have it."""
    lookup = store.open(address)
    return isinstance(lookup, Miss) and lookup.reason in ("absent", "expired")


def mark_without_source(database: sqlite3.Connection, addresses: Iterable[str]) -> None:
    """Mark entries as unwanted if no source has them."""
    database.executemany(MARK_IF_NO_SOURCE, [(address,) for address in addresses])


def mark_derived_from_lost(database: sqlite3.Connection, passages: Iterable[str]) -> None:
    """Record passages that have no source any more, and mark the entries computed from them as unwanted."""
    rows = [(passage,) for passage in passages]
    database.executemany(MARK_DERIVED_IF_ORIGIN_LOST, rows)
    database.executemany(RECORD_IF_LOST, rows)
    database.execute("DELETE FROM lost WHERE number <= (SELECT max(number) FROM lost) - ?", (JOURNAL_ROWS,))


Row = tuple[str, str, str, str]
"""Of the table `chunks`: source, address, wording, passage."""


class Sources:
    """The sources of every stored chunk; equal passages of two documents share one entry.

    Kept in `sources.db` in the store's folder, or in memory beside a store in memory. An entry whose last source is
    gone is removed from all tiers, pinned or not; if the process dies in between, `garbage.collect` finishes. Chunks
    that never had a source, such as the system prefix, are left alone. The store is not closed with this. Every method
    raises `StoreError` if the manifest cannot be read or written.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._prefix = store.prefix  # tenants have sources of their own
        self.manifest = Manifest(store.folder)
        self.garbage = Garbage(self.manifest, store)
        self.derivations = Derivations(self.manifest, store)

    def replace(self, source: str, keys: Iterable[ChunkKey]) -> int:
        """Set the chunks of a source; return how many entries were removed because no other source has them.

        Its chunks under a model, base or wording of the prompt that none of these keys has stay: two models may share
        a store.
        """
        return self._change(source, keys, replace=True)

    def generation(self) -> int:
        """Return how many times documents were forgotten or lost chunks, in any process."""
        [(number,)] = self.manifest.read("PRAGMA user_version")
        return int(number)

    def add(self, source: str, keys: Iterable[ChunkKey], *, generation: int | None = None) -> None:
        """Add chunks to a source. A job calls this before it writes them, and `confirm` afterwards.

        With a generation, `StoreError` is raised if it is another one by now: the chunks may be forgotten.
        """
        self._change(source, keys, replace=False, generation=generation)

    def confirm(self, source: str, keys: Iterable[ChunkKey], *, replace: bool) -> int:
        """Complete a job that added these chunks to a source before it wrote them; see `add` and `replace`.

        Another process may have forgotten the source or changed its chunks since then. That holds: what it took from
        the source does not come back, and nothing of the source is replaced.
        """
        wanted = {self._store.address(key): key for key in keys}
        name = self._prefix + source
        rows = self._rows(name, wanted)
        if self._is_recorded(name, rows, alone=replace):
            return self.garbage.collect()
        with self.manifest.writing() as database:
            recorded = database.execute("SELECT address FROM chunks WHERE source = ?", (name,)).fetchall()
            withdrawn = wanted.keys() - {address for (address,) in recorded}
            mark_without_source(database, withdrawn)
            if replace and not withdrawn:
                self._drop_stale(database, name, rows)
        return self.garbage.collect()

    def discard_unowned(self, keys: Iterable[ChunkKey]) -> int:
        """Remove entries of a job that no source has any more; return how many were removed."""
        addresses = [self._store.address(key) for key in keys]
        if all(self.manifest.read("SELECT 1 FROM chunks WHERE address = ? LIMIT 1", address) for address in addresses):
            return 0
        with self.manifest.writing() as database:
            mark_without_source(database, addresses)
        return self.garbage.collect()

    def release_removed(self, keys: Iterable[ChunkKey]) -> None:
        """Let entries that were removed with their source be stored without one; see `Garbage.ownerless`."""
        removed = {address for (address,) in self.manifest.read("SELECT address FROM gone")}
        addresses = [(address,) for key in keys if (address := self._store.address(key)) in removed]
        if addresses:
            with self.manifest.writing() as database:
                database.executemany("DELETE FROM gone WHERE address = ?", addresses)

    def remove(self, source: str, keys: Iterable[ChunkKey | str]) -> int:
        """Remove chunks from a source; return how many entries were removed because no other source has them."""
        with self.manifest.writing() as database:
            self._drop(database, self._prefix + source, [self._store.address(key) for key in keys])
        return self.garbage.collect()

    def forget(self, source: str) -> int:
        """Remove a source under every model and wording; return how many entries were removed.

        Its access tag stays, so that a document that is updated by deleting and adding it keeps it; see `restrict`.
        """
        name = self._prefix + source
        try:
            removed = self._forget(name)
        except StoreError:  # on a full disk nothing can be recorded: make room by what is to go anyway
            shared = "SELECT 1 FROM chunks WHERE address = ? AND source != ? LIMIT 1"
            own = [address for address in self.addresses(source) if not self.manifest.read(shared, address, name)]
            removed = sum(self._store.discard(address) for address in own)
            if not removed:
                raise
            removed += self._forget(name)
        self.manifest.clear_log()
        return removed

    def restrict(self, source: str, tag: str | None) -> int:
        """Set who may read a source, before or after its chunks are added, see `may_be_built_on`.

        Returns:
            How many entries were removed because they carry a passage that not all their readers may see.
        """
        name = self._prefix + source
        with self.manifest.writing() as database:
            if tag:
                unchanged = "SELECT 1 FROM access WHERE source = ?1 AND tag IS ?2"
                new = f"INSERT OR REPLACE INTO access SELECT ?1, ?2 WHERE NOT EXISTS ({unchanged})"
                database.execute(new, (name, tag))
            else:
                database.execute("DELETE FROM access WHERE source = ?", (name,))
            rows = database.execute("SELECT DISTINCT passage FROM chunks WHERE source = ?", (name,)).fetchall()
            mark_acl_violations(database, [passage for (passage,) in rows])
        return self.garbage.collect()

    def has_restricted(self) -> bool:
        """Return whether there is a source that not everybody may read."""
        return bool(self.manifest.read("SELECT 1 FROM access WHERE source GLOB ? LIMIT 1", f"{self._prefix}*"))

    def readers(self, key: ChunkKey) -> frozenset[str]:
        """Return the tags of a passage's readers, given any of its keys; none if no source has it."""
        rows = self.manifest.read(READERS, self.passage_id(key))
        return frozenset(tag for (tag,) in rows)

    def names(self) -> list[str]:
        """Return the names of the sources, in order."""
        rows = self.manifest.read("SELECT DISTINCT source FROM chunks WHERE typeof(source) = 'text' ORDER BY source")
        return [name.removeprefix(self._prefix) for (name,) in rows if name.startswith(self._prefix)]

    def addresses(self, source: str) -> set[str]:
        """Return the addresses of a source's chunks, including those that were evicted."""
        return set(_known(self.manifest.read("SELECT address FROM chunks WHERE source = ?", self._prefix + source)))

    def missing(self) -> dict[str, int]:
        """Return, by source, how many of its chunks are not in the store, since they were evicted or damaged."""
        counts = {name: sum(address not in self._store for address in self.addresses(name)) for name in self.names()}
        return {name: count for name, count in counts.items() if count}

    def other_wordings(self, passages: Iterable[Sequence[ChunkKey]]) -> dict[str, int]:
        """Return under which wordings passages are stored that have these keys, and not under these; see `wording_of`.

        The value is the number of passages under each.
        """
        counts = Counter[str]()
        for keys in passages:
            query = "SELECT DISTINCT wording FROM chunks WHERE passage = ?"
            found = {wording for (wording,) in self.manifest.read(query, self.passage_id(keys[0]))}
            counts.update(found if found.isdisjoint(map(wording_of, keys)) else ())
        return dict(counts)

    def passage_id(self, key: ChunkKey) -> str:
        """Return the name of a passage under whatever base it is stored; as hard to guess as its address."""
        return self._store.address(key.passage_key())

    def close(self) -> None:
        """Close the manifest."""
        self.manifest.close()

    def _forget(self, name: str) -> int:
        with self.manifest.writing() as database:
            self._drop(database, name)
            advance_generation(database)  # also if the source had no chunks: they may wait to be added
        return self.garbage.collect()

    def _change(self, source: str, keys: Iterable[ChunkKey], *, replace: bool, generation: int | None = None) -> int:
        wanted = {self._store.address(key): key for key in keys}
        name = self._prefix + source
        rows = self._rows(name, wanted)
        # Nothing is written without need: the manifest may be read-only, and a write would change its version.
        if self._is_recorded(name, rows, alone=replace):
            return self.garbage.collect()
        with self.manifest.writing() as database:
            if generation not in (None, *database.execute("PRAGMA user_version").fetchone()):
                raise StoreError("a document was forgotten meanwhile")
            database.executemany("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?)", rows)
            addresses = [(address,) for address in wanted]
            database.executemany("DELETE FROM unwanted WHERE address = ? AND NOT by_origin", addresses)
            if replace:
                self._drop_stale(database, name, rows)
            mark_acl_violations(database, {passage for _, _, _, passage in rows})
        return self.garbage.collect()

    def _rows(self, name: str, keys: Mapping[str, ChunkKey]) -> list[Row]:
        return [(name, address, wording_of(key), self.passage_id(key)) for address, key in keys.items()]

    def _drop_stale(self, database: sqlite3.Connection, name: str, rows: Sequence[Row]) -> None:
        """Take from a source the chunks of the same wordings that are not among these rows."""
        wanted, wordings = {address for _, address, _, _ in rows}, {wording for _, _, wording, _ in rows}
        recorded = database.execute("SELECT address, wording FROM chunks WHERE source = ?", (name,)).fetchall()
        stale = [address for address, wording in recorded if wording in wordings and address not in wanted]
        self._drop(database, name, stale)

    def _is_recorded(self, name: str, rows: Sequence[Row], *, alone: bool) -> bool:
        """Return whether a source has these chunks already; if `alone`, and no others of their wordings."""
        recorded = set(
            self.manifest.read("SELECT source, address, wording, passage FROM chunks WHERE source = ?", name)
        )
        unwanted = {address for (address,) in self.manifest.read("SELECT address FROM unwanted WHERE NOT by_origin")}
        wordings = {wording for _, _, wording, _ in rows}
        has_others = any(wording in wordings for _, _, wording, _ in recorded - set(rows))
        marked = any(address in unwanted for _, address, _, _ in rows)
        return set(rows) <= recorded and not marked and not (alone and has_others)

    def _drop(self, database: sqlite3.Connection, name: str, addresses: Iterable[str] | None = None) -> None:
        """Take chunks, all by default, from a source, as far as it has them; mark what becomes unwanted by that."""
        recorded = dict(database.execute("SELECT address, passage FROM chunks WHERE source = ?", (name,)).fetchall())
        dropped = list(recorded) if addresses is None else [a for a in addresses if a in recorded]
        if dropped:
            advance_generation(database)
        passages = {recorded[address] for address in dropped}
        database.executemany(
            "DELETE FROM chunks WHERE source = ? AND address = ?", [(name, address) for address in dropped]
        )
        mark_without_source(database, dropped)
        mark_derived_from_lost(database, passages)
        mark_acl_violations(database, passages)  # with one source less, they may have fewer readers


def advance_generation(database: sqlite3.Connection) -> None:
    """Record that something was taken from a source; see `Sources.generation`."""
    [(number,)] = database.execute("PRAGMA user_version").fetchall()
    database.execute(f"PRAGMA user_version = {(number + 1) % 2**31}")


def wording_of(key: ChunkKey) -> str:
    """Return a hash that keys share which have the same model, base and prefix."""
    return digest(f"{key.fingerprint.digest} {key.base} {key.prefix}".encode())


INSERT_RECOGNISED = """
INSERT OR IGNORE INTO recognised (passage, owner, ids, blocks, gaps) SELECT ?1, ?2, ?3, ?4, ?5
WHERE NOT EXISTS (SELECT 1 FROM recognised WHERE passage = ?1)
    AND (NOT ?6 OR EXISTS (SELECT 1 FROM chunks WHERE passage = ?1))
"""
"""Does not write a row that exists, nor that of a passage which lost its source meanwhile."""

IS_WHOLE = """
typeof(passage) = 'text' AND typeof(ids) = 'blob' AND length(ids) = 16 AND typeof(blocks) = 'blob'
    AND length(blocks) > 8 AND typeof(gaps) = 'blob'
"""
"""Whoever writes to the folder may have put in other values."""


class PassageRow(NamedTuple):
    """What a passage is recognised by; see `prompts.recognition` for the columns."""

    passage: str  # its name, see `Sources.passage_id`
    owner: int  # of the model and tenant
    ids: bytes
    blocks: bytes
    gaps: bytes
    needs_source: bool = False  # whether the row is not kept without a source


class PassageRows:
    """The rows of a manifest. Every method raises `StoreError` if it cannot be read or written."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def add(self, rows: Iterable[PassageRow]) -> None:
        """Write rows of passages that have none."""
        with self._manifest.writing() as database:
            database.executemany(INSERT_RECOGNISED, rows)

    def __contains__(self, passage: str) -> bool:
        return bool(self._manifest.read("SELECT 1 FROM recognised WHERE passage = ?", passage))

    def count(self, owner: int) -> int:
        """Return how many passages an owner has."""
        [(count,)] = self._manifest.read("SELECT count(*) FROM recognised WHERE owner = ?", owner)
        return int(count)

    def blocks_since(self, owner: int, number: int) -> list[tuple[int, bytes]]:
        """Return number and blocks of an owner's rows that were written after the row of a number."""
        query = f"SELECT number, blocks FROM recognised WHERE owner = ? AND number > ? AND {IS_WHOLE} ORDER BY number"
        return self._manifest.read(query, owner, number)

    def row(self, number: int) -> PassageRow | None:
        """Return a row, if it is still there."""
        query = f"SELECT passage, owner, ids, blocks, gaps FROM recognised WHERE number = ? AND {IS_WHOLE}"
        return next((PassageRow(*row) for row in self._manifest.read(query, number)), None)
