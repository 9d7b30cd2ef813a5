"""LangChain's documents as passages of the store."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.documents import Document

from qcfuse_rag.integrations import Passage

SOURCE_KEY = "source"
"""Metadata key under which LangChain's loaders note what a document was read from."""


def passage_of(document: Document, source_key: str | None) -> Passage:
    """Return a document as a passage; its source is `source_key` in its metadata, else its id, else None."""
    named = document.metadata.get(source_key) if source_key is not None else None
    source = document.id if named in (None, "") else named
    return Passage(document.page_content, None if source is None else str(source), document.metadata)


def texts_of(documents: Iterable[Document]) -> list[str]:
    """Return the texts of documents.

    Raises:
        TypeError: if `documents` is not a list of documents, such as one document.
    """
    if isinstance(documents, str):
        raise TypeError("documents are a list of langchain_core's Document, not of str")
    documents = list(documents)
    others = [type(document).__name__ for document in documents if not isinstance(document, Document)]
    if others:
        raise TypeError(f"documents are a list of langchain_core's Document, not of {others[0]}")
    return [document.page_content for document in documents]
