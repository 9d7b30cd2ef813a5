"""What a store's manifest keeps of passages, so that they are recognised in a text: hashes and whitespace, no text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from qcfuse_rag.store.documents.sources import Manifest

INSERT = """
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
    """What a passage is recognised by; see `prompts.passage_index` for the columns."""

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
            database.executemany(INSERT, rows)

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
