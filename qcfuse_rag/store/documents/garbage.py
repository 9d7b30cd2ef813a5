"""Remove entries that no source wants any more, and tell other processes which entries were removed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.documents.manifest import Manifest
from qcfuse_rag.store.documents.schema import KEPT_ROWS

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
    """The entries of a store that are marked unwanted in its manifest.

    Every method raises `StoreError` if the manifest cannot be read or written.

    Args:
        manifest: of the store.
        store: whose entries are removed.
    """

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
                    database.execute("DELETE FROM gone WHERE number <= last_insert_rowid() - ?", (KEPT_ROWS,))
                if wanted or gone:
                    database.execute("DELETE FROM unwanted WHERE address = ?", (address,))
                if gone:
                    database.execute("DELETE FROM derived WHERE address = ?", (address,))
        return removed

    def ownerless(self) -> list[str]:
        """Return the addresses of stored entries that were removed with their last source and came back without one.

        A job that was killed while another process forgot its document leaves such entries.
        """
        rows = self._manifest.query(OWNERLESS)
        return [a for (a,) in rows if a.startswith(self._store.prefix) and a in self._store]

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
        """Return the addresses removed since an earlier call.

        Args:
            number: as returned by the earlier call, or None for the first call.

        Returns:
            The number for the next call, and the addresses; none for the first call.
        """
        if number is None:
            [(last,)] = self._manifest.read("SELECT coalesce(max(number), 0) FROM gone")
            return last, []
        rows = self._manifest.read("SELECT number, address FROM gone WHERE number > ? ORDER BY number", number)
        return rows[-1][0] if rows else number, [address for _, address in rows]

    def _addresses(self) -> list[str]:
        rows = self._manifest.query("SELECT address FROM unwanted")
        return [address for (address,) in rows if address.startswith(self._store.prefix)]


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
    database.execute("DELETE FROM lost WHERE number <= (SELECT max(number) FROM lost) - ?", (KEPT_ROWS,))
