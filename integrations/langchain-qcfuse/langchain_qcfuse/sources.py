"""Which document a passage is from, so that it can be forgotten with it."""

from __future__ import annotations

from langchain_core.documents import Document

SOURCE_KEY = "source"
"""Metadata key under which LangChain's loaders say what a document was read from."""


def source_of(document: Document, source_key: str | None) -> str | None:
    """Return a document's `source_key` in its metadata, else its id, else None."""
    named = document.metadata.get(source_key) if source_key is not None else None
    source = document.id if named in (None, "") else named
    return None if source is None else str(source)
