"""Which document a passage is from, so that it can be forgotten with it."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.documents import Document

from qcfuse_rag.store.documents.acl import tags_of

Access = dict[str, str | None]

SOURCE_KEY = "source"
"""Metadata key under which LangChain's loaders say what a document was read from."""


def source_of(document: Document, source_key: str | None) -> str | None:
    """Return a document's `source_key` in its metadata, else its id, else None."""
    named = document.metadata.get(source_key) if source_key is not None else None
    source = document.id if named in (None, "") else named
    return None if source is None else str(source)


def access_of(documents: Iterable[Document], sources: Iterable[str | None], key: str | None) -> Access | None:
    """Return who may read each source by a metadata key of its documents; see `qcfuse_rag.tags_of`."""
    return tags_of(zip(sources, (document.metadata for document in documents), strict=True), key)
