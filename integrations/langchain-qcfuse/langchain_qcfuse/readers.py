"""Read what a vector store that already exists would show the model, so that it can be warmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_qcfuse.sources import SOURCE_KEY, source_of
from qcfuse_rag import QCFuseError


def read_vector_store(path: str | Path, source_key: str | None = SOURCE_KEY) -> Iterator[tuple[str, str]]:
    """Read the passages of a vector store that `InMemoryVectorStore.dump` wrote; no embedding model is needed.

    Args:
        path: of the JSON file.
        source_key: metadata key that says what a passage is from; its id where it does not. None: always the id, as in
            `QCFuseVectorStore`; needed if that is to delete what is warmed from here.

    Returns:
        For every document its source and its text.

    Raises:
        QCFuseError: if it is no such file. Pickled stores, such as those of FAISS, are not read, since reading a pickle
            can run any program.
    """
    try:
        entries = InMemoryVectorStore.load(str(path), cast(Embeddings, None)).store  # embeds nothing
        documents = [Document(entry["text"], id=id_, metadata=entry["metadata"]) for id_, entry in entries.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise QCFuseError(
            f"{path} is not a JSON file that `InMemoryVectorStore.dump` wrote ({error}). Pickles, such as FAISS's, are "
            "not read: load such a store yourself and give its documents to `ChatQCFuse.warm`"
        ) from error
    return ((source_of(document, source_key) or "", document.page_content) for document in documents)
