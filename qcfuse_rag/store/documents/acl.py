"""Access control: no cache carries a passage that a reader of the cache's own text must not see.

An enriched or captured cache carries something of the passages it was prefilled behind into every answer made from it.
It may be built on another passage only if everybody who may read its own passage may read that one too. Access belongs
to documents: a tag, or none for everybody. The readers of a passage that two documents have are those of both. Once
any document has a tag, nothing is built on a passage without a document: it may be a restricted text under another
model.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

EVERYBODY = ""
"""The tag of documents without one."""

MARK_VIOLATIONS = """
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


def may_be_built_on(readers: frozenset[str], origin_readers: frozenset[str]) -> bool:
    """Return whether a cache may be prefilled behind its origin; a passage without document has no known readers."""
    return EVERYBODY in origin_readers or (bool(readers) and readers <= origin_readers)


def tags_of(pieces: Iterable[tuple[str | None, Mapping[str, Any]]], key: str | None) -> dict[str, str | None] | None:
    """Return the access tag of each source from the metadata of its pieces, for `FusionEngine.warm`.

    A source has the tag that any of its pieces has. A source of which no piece has the key is left out, so that it
    keeps its tag; a key with an empty value opens a source to everybody.

    Args:
        pieces: source and metadata of each piece.
        key: of the tag in the metadata; None returns None.

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


def set_tag(database: sqlite3.Connection, source: str, tag: str | None) -> None:
    """Set who may read a source; None is everybody."""
    if tag:
        unchanged = "SELECT 1 FROM access WHERE source = ?1 AND tag IS ?2"
        database.execute(f"INSERT OR REPLACE INTO access SELECT ?1, ?2 WHERE NOT EXISTS ({unchanged})", (source, tag))
    else:
        database.execute("DELETE FROM access WHERE source = ?", (source,))


def mark_acl_violations(database: sqlite3.Connection, passages: Iterable[str]) -> None:
    """Mark entries as unwanted that `may_be_built_on` forbids now."""
    if database.execute("SELECT 1 FROM access LIMIT 1").fetchone():
        database.executemany(MARK_VIOLATIONS, [(passage,) for passage in passages])
