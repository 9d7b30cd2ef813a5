"""A vector store that takes stored caches along when it adds and deletes."""

from __future__ import annotations

import asyncio
import uuid
from itertools import repeat
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_qcfuse.chat_models import ChatQCFuse
from langchain_qcfuse.sources import access_of
from qcfuse_rag import QCFuseError
from qcfuse_rag.generation.caller_warnings import warn_not_stored


class Wrapped:
    """An attribute that is the wrapped vector store's own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: QCFuseVectorStore | None, owner: type | None = None) -> Any:
        return self if instance is None else getattr(instance.vector_store, self._name)


class QCFuseVectorStore(VectorStore):
    """Wraps any vector store: documents added to it are warmed, and what is deleted from it is forgotten.

    Made for `langchain_core.indexing.index`, which adds what is new or changed and, with a `cleanup`, deletes what is
    not there any more. The chat model's store knows a document by the id it has in the vector store, one for every
    piece a splitter made; so pieces may come in batches of any size, and a passage that another piece has too stays.
    Caches never outlive a document: what is to be deleted is forgotten first.

    With `cleanup="incremental"` and batches smaller than a source, `index` deletes pieces that have not come yet and
    adds them again, so that they are prefilled again; `"scoped_full"` does not. What `index` skips, because its record
    manager knows it, is not warmed: warm an index that existed before by `force_update=True`, or see
    `read_vector_store`.

    Example:
        ```python
        store = QCFuseVectorStore(InMemoryVectorStore(embeddings), chat)
        index(documents, record_manager, store, cleanup="incremental", source_id_key="source", key_encoder="sha256")
        retriever = store.as_retriever()
        ```

    Args:
        vector_store: the wrapped one; what only it can do is done there.
        chat: the chat model that will answer.
        access_key: metadata key that says who may read a document; see `ChatQCFuse.warm`.
    """

    def __init__(self, vector_store: VectorStore, chat: ChatQCFuse, access_key: str | None = None) -> None:
        self.vector_store = vector_store
        self.chat = chat
        self.access_key = access_key

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
        """Make a vector store of texts, and warm them.

        Args:
            texts: the texts.
            embedding: of the texts.
            metadatas: of each text.
            ids: of each text; drawn if not given.
            chat: the chat model that will answer.
            vector_store_class: what to wrap.
            access_key: metadata key that says who may read a text; see `ChatQCFuse.warm`.
            **kwargs: of its `from_texts`.
        """
        ids = [name or str(uuid.uuid4()) for name in ids or [""] * len(texts)]
        inner = vector_store_class.from_texts(texts, embedding, metadatas=metadatas, ids=ids, **kwargs)
        store = cls(inner, chat, access_key)
        given = [Document(text, metadata=about) for text, about in zip(texts, metadatas or repeat({}), strict=False)]
        store._warm_added(given, ids, ids)
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

    def _warm_added(self, documents: list[Document], given: list[str] | None, returned: list[str]) -> None:
        ids = given or [document.id for document in documents]
        known = [name for name in ids if name]  # what `index` will delete by, whatever the wrapped store returns
        texts = [document.page_content for document in documents]
        sources = known if len(known) == len(texts) else returned
        access = access_of(documents, sources, self.access_key)
        warn_not_stored(self.chat.engine.warm(texts, sources=sources, access=access))

    def _forget(self, ids: list[str] | None) -> None:
        if ids is None:
            raise QCFuseError(
                "vector stores differ in what deleting without ids deletes, so it is not known whose caches are to go: "
                "name the ids, or use the wrapped store and `chat.engine.forget(id)`"
            )
        for name in ids:
            self.chat.engine.forget(name)
