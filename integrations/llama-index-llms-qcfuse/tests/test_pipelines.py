"""LlamaIndex's own ingestion pipelines: caches follow changed and deleted documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from llama_index.core import SummaryIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseVectorStore, QCFuseWarmup, forget_missing
from qcfuse_rag import MemoryStore, QCFuseError
from tests.support.engines import make_engine
from tests.support.library import FERRY, HARBOUR, HULL, MILL, stored
from tests.support.llama_index_documents import EMBED, document, splitter


class Ingestion:
    """A pipeline over a docstore and a vector store; it warms with a transform or in the vector store."""

    def __init__(self, llm: QCFuseLLM, way: str, strategy: DocstoreStrategy = DocstoreStrategy.UPSERTS) -> None:
        self.engine, self.docstore = llm.engine, SimpleDocumentStore()
        self.warmup = QCFuseWarmup(llm)
        inner = SimpleVectorStore()
        self.pipeline = IngestionPipeline(
            transformations=[splitter(), EMBED, *([self.warmup] if way == "transform" else [])],
            docstore=self.docstore,
            vector_store=inner if way == "transform" else QCFuseVectorStore(inner, llm),
            docstore_strategy=strategy,
        )

    def run(self, **texts: Sequence[str]) -> None:
        self.pipeline.run(documents=[document(name, *passages) for name, passages in texts.items()])


both_ways = pytest.mark.parametrize("way", ["transform", "vector store"])


@both_ways
def test_a_changed_document_takes_its_stale_passages_along_and_no_others(llm: QCFuseLLM, way: str) -> None:
    ingestion = Ingestion(llm, way)
    ingestion.run(a=[FERRY, HULL], b=[HULL, MILL])
    assert stored(llm.engine) == {FERRY, HULL, MILL}
    ingestion.run(a=[HARBOUR], b=[HULL, MILL])
    assert stored(llm.engine) == {HULL, MILL, HARBOUR}, "b still has the hull"
    ingestion.run(a=[HARBOUR], b=[MILL])
    assert stored(llm.engine) == {MILL, HARBOUR}
    assert llm.engine.corpus.open_sources().names() == ["a", "b"]


def test_the_transform_prefills_only_what_is_new_in_a_changed_document(llm: QCFuseLLM) -> None:
    ingestion = Ingestion(llm, "transform")
    ingestion.run(a=[FERRY, HULL])
    ingestion.run(a=[FERRY, HULL, MILL])
    assert ingestion.warmup.summary is not None
    assert (ingestion.warmup.summary.present, ingestion.warmup.summary.warmed) == (2, 1)


@both_ways
def test_the_same_documents_twice_change_nothing(llm: QCFuseLLM, way: str) -> None:
    ingestion = Ingestion(llm, way)
    ingestion.run(a=[FERRY, HULL], b=[MILL])
    sources = llm.engine.corpus.open_sources()
    addresses = {name: sources.addresses(name) for name in sources.names()}
    entries = {entry.address for entry in llm.engine.store.entries()}
    ingestion.run(a=[FERRY, HULL], b=[MILL])
    sources = llm.engine.corpus.open_sources()
    assert {name: sources.addresses(name) for name in sources.names()} == addresses
    assert {entry.address for entry in llm.engine.store.entries()} == entries


@both_ways
def test_the_pipelines_own_cache_does_not_lose_a_document_that_changes_back(llm: QCFuseLLM, way: str) -> None:
    ingestion = Ingestion(llm, way)
    for passage in (FERRY, HULL, FERRY, HULL):
        ingestion.run(a=[passage])
        assert stored(llm.engine) == {passage}


@both_ways
def test_a_persisted_pipeline_warms_a_store_that_is_new(llm: QCFuseLLM, way: str, tmp_path: Path) -> None:
    first = Ingestion(llm, way)
    first.run(a=[FERRY])
    first.pipeline.persist(str(tmp_path))
    with make_engine(llm.engine.lm, MemoryStore()) as engine:
        other = QCFuseLLM.from_engine(engine)
        second = Ingestion(other, way)
        second.pipeline.cache = type(second.pipeline.cache).from_persist_path(str(tmp_path / "llama_cache"))
        second.run(a=[FERRY])
        assert stored(other.engine) == {FERRY}


def test_the_pipelines_own_cache_is_used_while_the_store_stays_as_it_is(llm: QCFuseLLM) -> None:
    pipeline = IngestionPipeline(transformations=[splitter(), QCFuseWarmup(llm)])
    sizes = []
    for _ in range(5):
        pipeline.run(documents=[document("a", FERRY)])
        sizes.append(len(pipeline.cache.cache.get_all(pipeline.cache.collection)))
    assert sizes == [2, 3, 3, 3, 3], "one more after the first run, which changed the store"
    llm.engine.forget("a")
    pipeline.run(documents=[document("a", FERRY)])
    assert stored(llm.engine) == {FERRY}


def test_a_pipeline_that_deletes_takes_caches_along(llm: QCFuseLLM) -> None:
    ingestion = Ingestion(llm, "vector store", DocstoreStrategy.UPSERTS_AND_DELETE)
    ingestion.run(a=[FERRY, HULL], b=[HULL, MILL])
    ingestion.run(b=[HULL, MILL])
    assert stored(llm.engine) == {HULL, MILL}
    assert llm.engine.corpus.open_sources().names() == ["b"]


async def test_an_asynchronous_pipeline_takes_caches_along(llm: QCFuseLLM) -> None:
    ingestion = Ingestion(llm, "vector store", DocstoreStrategy.UPSERTS_AND_DELETE)
    await ingestion.pipeline.arun(documents=[document("a", FERRY), document("b", HULL)])
    await ingestion.pipeline.arun(documents=[document("b", MILL)])
    assert stored(llm.engine) == {MILL}


@both_ways
def test_garbage_collection_forgets_what_a_pipelines_docstore_no_longer_has(llm: QCFuseLLM, way: str) -> None:
    ingestion = Ingestion(llm, way)
    ingestion.run(a=[FERRY, HULL], b=[HULL, MILL])
    assert forget_missing(llm, ingestion.docstore) == []
    ingestion.docstore.delete_document("a")
    assert forget_missing(llm, ingestion.docstore) == ["a"]
    assert stored(llm.engine) == {HULL, MILL}
    assert forget_missing(llm.engine, ingestion.docstore) == []


def test_garbage_collection_forgets_what_an_indexs_docstore_no_longer_has(llm: QCFuseLLM) -> None:
    index = SummaryIndex.from_documents(
        [document("a", FERRY, HULL), document("b", HULL, MILL)], transformations=[splitter(), QCFuseWarmup(llm)]
    )
    index.delete_ref_doc("a")
    assert forget_missing(llm, index.docstore) == [], "its nodes are still in the docstore"
    index.delete_ref_doc("b", delete_from_docstore=True)
    assert forget_missing(llm, index.docstore) == ["b"]
    assert stored(llm.engine) == {FERRY, HULL}


def test_garbage_collection_tells_equal_documents_apart_and_takes_several_docstores(llm: QCFuseLLM) -> None:
    ingestion, other = Ingestion(llm, "transform"), Ingestion(llm, "transform")
    ingestion.run(a=[FERRY], b=[FERRY])
    other.run(c=[MILL])
    assert forget_missing(llm, ingestion.docstore, other.docstore) == []
    assert forget_missing(llm, ingestion.docstore) == ["c"]


def test_garbage_collection_with_an_empty_docstore_is_refused(llm: QCFuseLLM) -> None:
    assert forget_missing(llm, SimpleDocumentStore()) == [], "nothing to forget"
    Ingestion(llm, "transform").run(a=[FERRY])
    with pytest.raises(QCFuseError, match="the docstore has no documents, so all would be forgotten"):
        forget_missing(llm, SimpleDocumentStore())
    assert stored(llm.engine) == {FERRY}
