"""A vector store that warms the nodes it adds and forgets the documents it deletes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from fsspec import AbstractFileSystem
from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import MetadataFilters, SimpleVectorStore, VectorStoreQuery, VectorStoreQueryResult
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from llama_index.llms.qcfuse.base import QCFuseLLM
from llama_index.llms.qcfuse.nodes import passage_of, source_of, text_of, warn_of_windows
from qcfuse_rag import QCFuseError
from qcfuse_rag.integrations import warm_passages, warn_not_stored
from qcfuse_rag.methods import all_bases, find_base


class QCFuseVectorStore(BasePydanticVectorStore):
    """Wraps any vector store: added nodes are warmed, deleted documents are forgotten by the LLM's store.

    Give it to an `IngestionPipeline` (with a docstore; `UPSERTS_AND_DELETE` also passes deletions on) or to a
    `VectorStoreIndex` in place of the wrapped store. It needs no `QCFuseWarmup`, and unlike that it sees nodes from the
    pipeline's own cache, single nodes of a document, and deletions. A passage stays while another document has it.
    Caches never outlive a document: it is warmed after it was added, and forgotten before it is deleted.

    LlamaIndex deletes a changed document before it adds it, so all its passages are prefilled again. If that costs too
    much, use `QCFuseWarmup` with a plain vector store, and `forget_missing`.

    Example:
        ```python
        store = QCFuseVectorStore(SimpleVectorStore(), llm)
        index = VectorStoreIndex([], storage_context=StorageContext.from_defaults(vector_store=store))
        index.insert(document)  # warmed
        index.delete_ref_doc(document.doc_id)  # forgotten
        ```

    Args:
        vector_store: the wrapped vector store.
        llm: the LLM that will answer.
        access_key: metadata key of the tag that says who may read a document; see `QCFuseWarmup`.
        target_metadata_key: metadata key of the text to warm in place of a node's own; see `QCFuseWarmup`.
        show_progress: whether to show a bar while nodes are warmed; None: in a terminal.
    """

    vector_store: BasePydanticVectorStore = Field(description="The wrapped vector store.", exclude=True)
    llm: QCFuseLLM = Field(description="The LLM that will answer.", exclude=True)
    access_key: str | None = Field(default=None, description="Metadata key that says who may read a document.")
    target_metadata_key: str | None = Field(default=None, description="Metadata key of the text to warm.")
    show_progress: bool | None = Field(default=None, description="Whether to show a bar; None: in a terminal.")

    def __init__(
        self,
        vector_store: BasePydanticVectorStore,
        llm: QCFuseLLM,
        access_key: str | None = None,
        target_metadata_key: str | None = None,
        show_progress: bool | None = None,
    ) -> None:
        super().__init__(
            vector_store=vector_store,
            llm=llm,
            access_key=access_key,
            target_metadata_key=target_metadata_key,
            show_progress=show_progress,
            stores_text=vector_store.stores_text,
            is_embedding_query=vector_store.is_embedding_query,
        )

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name in LlamaIndex."""
        return "QCFuseVectorStore"

    @property
    def client(self) -> Any:
        """The wrapped vector store's client."""
        return self.vector_store.client

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes, then warm them; a document's earlier passages stay."""
        ids = self.vector_store.add(nodes, **kwargs)
        self._warm(nodes)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes, then warm them on a worker thread."""
        ids = await self.vector_store.async_add(nodes, **kwargs)
        await asyncio.to_thread(self._warm, nodes)
        return ids

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Forget a document, then delete its nodes."""
        self.llm.engine.forget(ref_doc_id)
        self.vector_store.delete(ref_doc_id, **delete_kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Forget a document on a worker thread, then delete its nodes."""
        await asyncio.to_thread(self.llm.engine.forget, ref_doc_id)
        await self.vector_store.adelete(ref_doc_id, **delete_kwargs)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Forget the passages of nodes that the wrapped store can return, and delete the nodes.

        `SimpleVectorStore` only knows the documents of its nodes, so passages are forgotten with their document's last
        node. With other stores that do not return nodes, they are forgotten when the document is deleted.
        """
        if node_ids or filters:
            with suppress(NotImplementedError):
                self._forget_nodes(self.vector_store.get_nodes(node_ids=node_ids, filters=filters))
        before = self._simple_sources()
        self.vector_store.delete_nodes(node_ids=node_ids, filters=filters, **delete_kwargs)
        self._forget(before - self._simple_sources())

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Forget the passages of nodes and delete the nodes, like `delete_nodes`."""
        if node_ids or filters:
            with suppress(NotImplementedError):
                nodes = await self.vector_store.aget_nodes(node_ids=node_ids, filters=filters)
                await asyncio.to_thread(self._forget_nodes, nodes)
        before = self._simple_sources()
        await self.vector_store.adelete_nodes(node_ids=node_ids, filters=filters, **delete_kwargs)
        await asyncio.to_thread(self._forget, before - self._simple_sources())

    def clear(self) -> None:
        """Forget every document of the wrapped store, then clear it.

        Raises:
            QCFuseError: if the wrapped store cannot list its documents; then nothing is forgotten or cleared.
        """
        self._forget(self._all_sources())
        self.vector_store.clear()

    async def aclear(self) -> None:
        """Forget every document of the wrapped store and clear it, like `clear`."""
        await asyncio.to_thread(lambda: self._forget(self._all_sources()))
        await self.vector_store.aclear()

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **kwargs: Any
    ) -> list[BaseNode]:
        """Return nodes of the wrapped store."""
        return self.vector_store.get_nodes(node_ids=node_ids, filters=filters, **kwargs)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **kwargs: Any
    ) -> list[BaseNode]:
        """Return nodes of the wrapped store."""
        return await self.vector_store.aget_nodes(node_ids=node_ids, filters=filters, **kwargs)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the wrapped store."""
        return self.vector_store.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the wrapped store."""
        return await self.vector_store.aquery(query, **kwargs)

    def persist(self, persist_path: str, fs: AbstractFileSystem | None = None) -> None:
        """Persist the wrapped store; to restore, load that store and wrap it again."""
        self.vector_store.persist(persist_path, fs=fs)

    def _warm(self, nodes: Sequence[BaseNode]) -> None:
        warn_of_windows(nodes, self.target_metadata_key)
        passages = [passage_of(node, self.target_metadata_key) for node in nodes]
        summary = warm_passages(
            self.llm.engine, passages, access_key=self.access_key, show_progress=self.show_progress, replace=False
        )
        warn_not_stored(summary)

    def _forget_nodes(self, nodes: Sequence[BaseNode]) -> None:
        engine, bases = self.llm.engine, [find_base(name) for name in all_bases()]
        for node in nodes:
            keys = engine.corpus.keys(engine.prompts.chunk_ids(text_of(node, self.target_metadata_key)), bases)
            engine.corpus.open_sources().remove(source_of(node), keys)

    def _forget(self, sources: Iterable[str]) -> None:
        for source in sources:
            self.llm.engine.forget(source)

    def _simple_sources(self) -> set[str]:
        if not isinstance(self.vector_store, SimpleVectorStore):
            return set()
        documents = self.vector_store.data.text_id_to_ref_doc_id.items()
        return {node if document == "None" else document for node, document in documents}  # as source_of

    def _all_sources(self) -> set[str]:
        if isinstance(self.vector_store, SimpleVectorStore):
            return self._simple_sources()
        try:
            return {source_of(node) for node in self.vector_store.get_nodes()}
        except (NotImplementedError, TypeError, ValueError) as error:
            raise QCFuseError(
                f"{type(self.vector_store).__name__} cannot list its documents, so the caches to delete are not known: "
                "delete documents one by one, or clear the wrapped store and use `forget_missing`"
            ) from error
