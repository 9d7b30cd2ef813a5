"""Tables of the manifest, the database of a store's sources.

`chunks` says which source has which entry; `passage` names a passage under whatever base it is stored. `derived` says
which passages (`origin`) an entry was computed from. `unwanted` lists the entries to remove, `gone` those removed,
`lost` the passages that lost their last source. `access` holds the tags of restricted sources, `located` what passages
are recognised by in a text.
"""

from __future__ import annotations

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
