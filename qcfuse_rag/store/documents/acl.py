"""Who may read a passage, so that no cache remembers what the reader of its text must not see.

An enriched or captured cache carries something of the passages it was born behind into every answer made from it. It
may only have been born behind passages that everybody may read who may read the passage itself. Access is a document's:
a tag, or none for everybody. A passage that two documents have is read by the readers of both. As soon as one document
has a tag, what no document has is remembered by nobody: it may be a restricted text under another model.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

EVERYBODY = ""
"""The tag of documents without one."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS access (source TEXT PRIMARY KEY, tag TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS derived_by_passage ON derived (passage);
CREATE VIEW IF NOT EXISTS readers AS
SELECT DISTINCT passage, COALESCE(tag, '') AS tag FROM chunks LEFT JOIN access USING (source);
"""

OVERSTEPPING = """
INSERT OR REPLACE INTO unwanted SELECT DISTINCT address, 1 FROM derived AS d
WHERE (passage = ?1 OR origin = ?1)
AND NOT EXISTS (SELECT 1 FROM readers WHERE passage = d.origin AND tag = '')
AND (
    NOT EXISTS (SELECT 1 FROM readers WHERE passage = d.passage)
    OR EXISTS (
        SELECT 1 FROM readers AS own WHERE own.passage = d.passage
        AND NOT EXISTS (SELECT 1 FROM readers AS theirs WHERE theirs.passage = d.origin AND theirs.tag = own.tag)
    )
)
"""


def may_remember(own: frozenset[str], other: frozenset[str]) -> bool:
    """Return whether a passage's cache may be born behind another passage.

    Args:
        own: tags of the passage's readers.
        other: tags of the other's; nobody knows who may read a passage of no document.
    """
    return EVERYBODY in other or (bool(own) and own <= other)


def tags_of(pieces: Iterable[tuple[str | None, Mapping[str, Any]]], key: str | None) -> dict[str, str | None] | None:
    """Return who may read each source, by the metadata of its pieces; for `FusionEngine.warm`.

    A source of which a piece has a tag has that tag. Where no piece has the key nothing is said, so that what has a tag
    keeps it; a key with an empty value makes a source everybody's.

    Args:
        pieces: the source and the metadata of each.
        key: in the metadata; None says nothing of any source.

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
        before = tags.get(source)
        if tag and before and tag != before:
            raise ValueError(f"pieces of one document have different tags under {key!r}; give all of them the same")
        tags[source] = tag or before
    return tags


def give_tag(database: sqlite3.Connection, source: str, tag: str | None) -> None:
    """Say who may read a source; None is everybody."""
    if tag:
        known = "SELECT 1 FROM access WHERE source = ?1 AND tag IS ?2"
        database.execute(f"INSERT OR REPLACE INTO access SELECT ?1, ?2 WHERE NOT EXISTS ({known})", (source, tag))
    else:
        database.execute("DELETE FROM access WHERE source = ?", (source,))


def note_overstepping(database: sqlite3.Connection, passages: Iterable[str]) -> None:
    """Note as unwanted what remembers a passage that not all its readers may see; `may_remember` in SQL.

    Args:
        database: the manifest.
        passages: those whose readers have changed.
    """
    if database.execute("SELECT 1 FROM access LIMIT 1").fetchone():
        database.executemany(OVERSTEPPING, [(passage,) for passage in passages])
