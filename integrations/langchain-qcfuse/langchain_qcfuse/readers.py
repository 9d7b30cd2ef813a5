"""Read the passages of an existing vector store, to warm them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_qcfuse.messages import SOURCE_KEY, passage_of
from qcfuse_rag import QCFuseError


def read_vector_store(path: str | Path, source_key: str | None = SOURCE_KEY) -> Iterator[tuple[str, str]]:
    """Read the passages of a file that `InMemoryVectorStore.dump` wrote; no embedding model is needed.

    Args:
        path: path of the JSON file.
        source_key: metadata key of a passage's source; without that key the id is the source. None: always the id, as
            in `QCFuseVectorStore`, which can then delete the passages that are warmed from here.

    Returns:
        The source and the text of every document.

    Raises:
        QCFuseError: if it is not such a file. Pickled stores, such as FAISS's, are not read: reading a pickle can run
            any program.
    """
    try:
        entries = InMemoryVectorStore.load(str(path), cast(Embeddings, None)).store  # embeds nothing
        documents = [Document(entry["text"], id=id_, metadata=entry["metadata"]) for id_, entry in entries.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise QCFuseError(
            f"{path} is not a JSON file that `InMemoryVectorStore.dump` wrote ({error}). Pickles, such as FAISS's, are "
            "not read: load such a store yourself and give its documents to `ChatQCFuse.warm`"
        ) from error
    passages = (passage_of(document, source_key) for document in documents)
    return ((passage.source or "", passage.text) for passage in passages)
