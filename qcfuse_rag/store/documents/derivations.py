"""Record which passages an entry was computed from, so that it goes when one of them goes.

An enriched or captured cache carries something of the passages it was prefilled behind. When one of these loses its
last source, the cache is removed, even if its own passage still has a source.
"""

from __future__ import annotations

from collections.abc import Iterable

from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.documents import acl
from qcfuse_rag.store.documents.garbage import is_gone
from qcfuse_rag.store.documents.manifest import Manifest
from qcfuse_rag.store.key import ChunkKey

MARK_IF_ORIGIN_LOST_SINCE = """
INSERT OR REPLACE INTO unwanted SELECT ?1, 1
WHERE EXISTS (SELECT 1 FROM lost WHERE number > ?2 AND passage IN (SELECT origin FROM derived WHERE address = ?1))
"""
IS_UNMARKED = """
SELECT 1 FROM derived WHERE address = ?1 AND NOT EXISTS (SELECT 1 FROM unwanted WHERE address = ?1) LIMIT 1
"""


class Derivations:
    """The origins of a store's entries: the passages that each was computed from.

    Every method raises `StoreError` if the manifest cannot be read or written.

    Args:
        manifest: of the store.
        store: whose entries.
    """

    def __init__(self, manifest: Manifest, store: KVStore) -> None:
        self._manifest, self._store = manifest, store

    def set_origins(self, key: ChunkKey, origins: Iterable[ChunkKey], *, since: int) -> None:
        """Record the origins of an entry that is about to be written, replacing those recorded before.

        Args:
            key: of the entry.
            origins: a key of each passage, under any base.
            since: `loss_count` at the time the origins were chosen; the entry is unwanted if one was lost since.
        """
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
            acl.mark_acl_violations(database, [passage])

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
        rows = self._manifest.query("SELECT origin FROM derived WHERE address = ?", self._store.address(key))
        return frozenset(origin for (origin,) in rows)

    def loss_count(self) -> int:
        """Return how many times a passage lost its last source; see `set_origins`."""
        [(count,)] = self._manifest.query("SELECT coalesce(max(number), 0) FROM lost")
        return int(count)
