"""A vector store that warms the documents it adds and forgets the documents it deletes."""

from __future__ import annotations

import asyncio
import uuid
from itertools import repeat
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_qcfuse.chat_models import ChatQCFuse
from qcfuse_rag import QCFuseError
from qcfuse_rag.integrations import Passage, warm_passages, warn_not_stored


class Wrapped:
    """An attribute of the wrapped vector store."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: QCFuseVectorStore | None, owner: type | None = None) -> Any:
        return self if instance is None else getattr(instance.vector_store, self._name)


class QCFuseVectorStore(VectorStore):
    """Wraps any vector store: added documents are warmed, deleted documents are forgotten.

    Made for `langchain_core.indexing.index`, which adds new and changed documents and, with a `cleanup`, deletes stale
    ones. The chat model's store knows a document by its id in the vector store. A splitter gives every piece an id of
    its own, so pieces may come in batches of any size, and a passage stays while another piece has it. Caches never
    outlive a document: it is forgotten before it is deleted.

    With `cleanup="incremental"` and batches smaller than a source, `index` deletes pieces that are still to come and
    adds them again, so they are prefilled again; `"scoped_full"` does not. Documents that `index` skips, because its
    record manager knows them, are not warmed: warm an existing index with `force_update=True`, or see
    `read_vector_store`.

    Example:
        ```python
        store = QCFuseVectorStore(InMemoryVectorStore(embeddings), chat)
        index(documents, record_manager, store, cleanup="incremental", source_id_key="source", key_encoder="sha256")
        retriever = store.as_retriever()
        ```

    Args:
        vector_store: the wrapped vector store; use it directly for its own methods.
        chat: the chat model that will answer.
        access_key: metadata key of the tag that says who may read a document; see `ChatQCFuse.warm`.
        show_progress: whether to show a bar while documents are warmed; None: in a terminal.
    """

    def __init__(
        self,
        vector_store: VectorStore,
        chat: ChatQCFuse,
        access_key: str | None = None,
        show_progress: bool | None = None,
    ) -> None:
        self.vector_store = vector_store
        self.chat = chat
        self.access_key = access_key
        self.show_progress = show_progress

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        chat: ChatQCFuse,
        vector_store_class: type[VectorStore] = InMemoryVectorStore,
        access_key: str | None = None,
        **kwargs: Any,
    ) -> QCFuseVectorStore:
        """Create a vector store of texts, and warm the texts.

        Args:
            texts: the texts.
            embedding: the embedding model.
            metadatas: metadata of each text.
            ids: id of each text; random if not given.
            chat: the chat model that will answer.
            vector_store_class: class of the wrapped vector store.
            access_key: metadata key of the tag that says who may read a text; see `ChatQCFuse.warm`.
            **kwargs: other arguments of the wrapped class's `from_texts`.
        """
        ids = [name or str(uuid.uuid4()) for name in ids or [""] * len(texts)]
        wrapped = vector_store_class.from_texts(texts, embedding, metadatas=metadatas, ids=ids, **kwargs)
        store = cls(wrapped, chat, access_key)
        pairs = zip(texts, metadatas or repeat({}), strict=False)
        store._warm_added([Document(text, metadata=metadata) for text, metadata in pairs], ids, ids)
        return store

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add or update documents, and warm them."""
        ids = self.vector_store.add_documents(documents, **kwargs)
        self._warm_added(documents, kwargs.get("ids"), ids)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add or update documents, and warm them on a worker thread."""
        ids = await self.vector_store.aadd_documents(documents, **kwargs)
        await asyncio.to_thread(self._warm_added, documents, kwargs.get("ids"), ids)
        return ids

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Forget documents, then delete them.

        Raises:
            QCFuseError: if no ids are given.
        """
        self._forget(ids)
        return self.vector_store.delete(ids, **kwargs)

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Forget documents on a worker thread, then delete them.

        Raises:
            QCFuseError: if no ids are given.
        """
        await asyncio.to_thread(self._forget, ids)
        return await self.vector_store.adelete(ids, **kwargs)

    embeddings = Wrapped()
    get_by_ids = Wrapped()
    aget_by_ids = Wrapped()
    search = Wrapped()
    asearch = Wrapped()
    similarity_search = Wrapped()
    asimilarity_search = Wrapped()
    similarity_search_with_score = Wrapped()
    asimilarity_search_with_score = Wrapped()
    similarity_search_with_relevance_scores = Wrapped()
    asimilarity_search_with_relevance_scores = Wrapped()
    similarity_search_by_vector = Wrapped()
    asimilarity_search_by_vector = Wrapped()
    max_marginal_relevance_search = Wrapped()
    amax_marginal_relevance_search = Wrapped()
    max_marginal_relevance_search_by_vector = Wrapped()
    amax_marginal_relevance_search_by_vector = Wrapped()

    def _warm_added(self, documents: list[Document], ids: list[str] | None, returned_ids: list[str]) -> None:
        known_ids = [id_ for id_ in ids or [document.id for document in documents] if id_]
        # `index` sets all ids and deletes by them, whatever ids the wrapped store returns.
        sources = known_ids if len(known_ids) == len(documents) else returned_ids
        passages = [
            Passage(document.page_content, source, document.metadata)
            for document, source in zip(documents, sources, strict=True)
        ]
        summary = warm_passages(
            self.chat.engine, passages, access_key=self.access_key, show_progress=self.show_progress
        )
        warn_not_stored(summary)

    def _forget(self, ids: list[str] | None) -> None:
        if ids is None:
            raise QCFuseError(
                "vector stores differ in what they delete without ids, so the caches to delete are not known: "
                "name the ids, or use the wrapped store and `chat.engine.forget(id)`"
            )
        for id_ in ids:
            self.chat.engine.forget(id_)
