"""What the tests of the LlamaIndex integration retrieve from: documents, embeddings, a vector store, indexes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import MetadataFilters
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseWarmup
from tests.support.passages import PASSAGES

EMBED = MockEmbedding(embed_dim=4)


class LetterEmbedding(BaseEmbedding):
    """Counts letters: enough to retrieve by, and no model."""

    def _vector(self, text: str) -> list[float]:
        return [float(text.lower().count(chr(ord("a") + i))) + 0.1 for i in range(26)]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._vector(text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)


class TextStore(BasePydanticVectorStore):
    """A vector store that keeps nodes, as most do that are databases."""

    stores_text: bool = True
    nodes: dict[str, BaseNode] = Field(default_factory=dict)

    @property
    def client(self) -> None:
        return None

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        self.nodes = {**self.nodes, **{node.node_id: node for node in nodes}}
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        self.nodes = {name: node for name, node in self.nodes.items() if node.ref_doc_id != ref_doc_id}

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        return [node for name, node in self.nodes.items() if node_ids is None or name in node_ids]

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        self.nodes = {name: node for name, node in self.nodes.items() if name not in (node_ids or ())}

    def clear(self) -> None:
        self.nodes = {}

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return VectorStoreQueryResult(nodes=list(self.nodes.values()), similarities=[1.0] * len(self.nodes))


def splitter() -> SentenceSplitter:
    return SentenceSplitter(chunk_size=32, chunk_overlap=0)


def document(name: str, *passages: str) -> Document:
    return Document(text="\n\n\n".join(passages), id_=name)


def vector_index(store: BasePydanticVectorStore, *documents: Document) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        list(documents),
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=EMBED,
        transformations=[splitter()],
    )


def warmed_index(llm: QCFuseLLM) -> VectorStoreIndex:
    documents = [Document(text=text, metadata={"page": number}) for number, text in enumerate(PASSAGES)]
    steps = [SentenceSplitter(chunk_size=200, chunk_overlap=0), LetterEmbedding(), QCFuseWarmup(llm)]
    nodes = IngestionPipeline(transformations=steps).run(documents=documents)
    return VectorStoreIndex(nodes, embed_model=LetterEmbedding())


def hits(reports: Sequence[dict[str, Any]]) -> list[int]:
    """Return how many nodes each prompt reused; fails if there was one that could not be."""
    assert all(lookup["hit"] for report in reports for lookup in report["lookups"])
    return [report["passages_reused"] for report in reports]
