"""Changed and deleted documents take their caches along, in LlamaIndex's own pipelines and indexes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, SummaryIndex, VectorStoreIndex, load_index_from_storage
from llama_index.core.bridge.pydantic import Field
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilters, SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult

from llama_index.llms.qcfuse import (
    FusionEndEvent,
    QCFuseLLM,
    QCFuseSynthesizer,
    QCFuseVectorStore,
    QCFuseWarmup,
    forget_missing,
    read_index,
)
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, QCFuseError
from tests.conftest import PASSAGES, QUESTION
from tests.families import build_model, build_tokenizer

FERRY, HULL, MILL = PASSAGES
HARBOUR = "The harbour master lives above the bakery. She reads the tide tables aloud at noon to whoever asks."
EMBED = MockEmbedding(embed_dim=4)


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


class SilentStore(TextStore):
    """One that cannot return nodes."""

    def get_nodes(self, *args: Any, **kwargs: Any) -> list[BaseNode]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel.wrap(build_model("llama", max_position_embeddings=2048), build_tokenizer(lambda: PASSAGES))


@pytest.fixture
def llm(lm: LanguageModel) -> Iterator[QCFuseLLM]:
    with FusionEngine(lm, MemoryStore()) as engine:
        yield QCFuseLLM.from_engine(engine, max_new_tokens=4)


@pytest.fixture
def lookups() -> Iterator[list[dict[str, Any]]]:
    """Collect what fused prefills looked up."""
    seen: list[dict[str, Any]] = []

    class Collect(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            if isinstance(event, FusionEndEvent):
                seen.extend(event.report["lookups"])

    root, handler = get_dispatcher(), Collect()
    root.add_event_handler(handler)
    yield seen
    root.event_handlers.remove(handler)


class Ingestion:
    """A pipeline over a docstore and a vector store that warms either way: by a transform or in the vector store."""

    def __init__(self, llm: QCFuseLLM, way: str, strategy: DocstoreStrategy = DocstoreStrategy.UPSERTS) -> None:
        self.engine, self.docstore = llm.engine, SimpleDocumentStore()
        self.warmup = QCFuseWarmup(llm)
        plain = SimpleVectorStore()
        self.pipeline = IngestionPipeline(
            transformations=[splitter(), EMBED, *([self.warmup] if way == "transform" else [])],
            docstore=self.docstore,
            vector_store=plain if way == "transform" else QCFuseVectorStore(plain, llm),
            docstore_strategy=strategy,
        )

    def run(self, **texts: Sequence[str]) -> None:
        self.pipeline.run(documents=[document(name, *passages) for name, passages in texts.items()])


both_ways = pytest.mark.parametrize("way", ["transform", "vector store"])


def splitter() -> SentenceSplitter:
    return SentenceSplitter(chunk_size=32, chunk_overlap=0)


def document(name: str, *passages: str) -> Document:
    return Document(text="\n\n\n".join(passages), id_=name)


def stored(llm: QCFuseLLM, among: Sequence[str] = (FERRY, HULL, MILL, HARBOUR)) -> set[str]:
    """Return which passages' caches are in the store."""
    engine = llm.engine
    base = engine.method.base
    assert base is not None
    keys = {text: engine.keys(engine.prompts.chunk_ids(text), [base])[0] for text in among}
    return {text for text, key in keys.items() if key in engine.store}


def vector_index(store: BasePydanticVectorStore, *documents: Document) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        list(documents),
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=EMBED,
        transformations=[splitter()],
    )


@both_ways
def test_a_changed_document_takes_its_stale_passages_along_and_no_others(llm: QCFuseLLM, way: str) -> None:
    ingestion = Ingestion(llm, way)
    ingestion.run(a=[FERRY, HULL], b=[HULL, MILL])
    assert stored(llm) == {FERRY, HULL, MILL}
    ingestion.run(a=[HARBOUR], b=[HULL, MILL])
    assert stored(llm) == {HULL, MILL, HARBOUR}, "b still has the hull"
    ingestion.run(a=[HARBOUR], b=[MILL])
    assert stored(llm) == {MILL, HARBOUR}
    assert llm.engine.sources.names() == ["a", "b"]


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
    before = {name: llm.engine.sources.addresses(name) for name in llm.engine.sources.names()}
    entries = {entry.address for entry in llm.engine.store.entries()}
    ingestion.run(a=[FERRY, HULL], b=[MILL])
    assert {name: llm.engine.sources.addresses(name) for name in llm.engine.sources.names()} == before
    assert {entry.address for entry in llm.engine.store.entries()} == entries


@both_ways
def test_the_pipelines_own_cache_does_not_lose_a_document_that_changes_back(llm: QCFuseLLM, way: str) -> None:
    ingestion = Ingestion(llm, way)
    for passage in (FERRY, HULL, FERRY, HULL):
        ingestion.run(a=[passage])
        assert stored(llm) == {passage}


@both_ways
def test_the_pipelines_own_cache_does_not_lose_a_document_that_was_forgotten(llm: QCFuseLLM, way: str) -> None:
    ingestion = Ingestion(llm, way)
    ingestion.run(a=[FERRY])
    llm.engine.forget("a")
    ingestion.docstore.delete_document("a")
    ingestion.run(a=[FERRY])
    assert stored(llm) == {FERRY}


@both_ways
def test_a_persisted_pipeline_warms_a_store_that_is_new(llm: QCFuseLLM, way: str, tmp_path: Path) -> None:
    first = Ingestion(llm, way)
    first.run(a=[FERRY])
    first.pipeline.persist(str(tmp_path))
    with FusionEngine(llm.engine.lm, MemoryStore()) as engine:
        other = QCFuseLLM.from_engine(engine)
        second = Ingestion(other, way)
        second.pipeline.cache = type(second.pipeline.cache).from_persist_path(str(tmp_path / "llama_cache"))
        second.run(a=[FERRY])
        assert stored(other) == {FERRY}


def test_the_pipelines_own_cache_is_used_while_the_store_stays_as_it_is(llm: QCFuseLLM) -> None:
    pipeline = IngestionPipeline(transformations=[splitter(), QCFuseWarmup(llm)])
    sizes = []
    for _ in range(5):
        pipeline.run(documents=[document("a", FERRY)])
        sizes.append(len(pipeline.cache.cache.get_all(pipeline.cache.collection)))
    assert sizes == [2, 3, 3, 3, 3], "one more after the first run, which changed the store"
    llm.engine.forget("a")
    pipeline.run(documents=[document("a", FERRY)])
    assert stored(llm) == {FERRY}


def test_a_pipeline_that_deletes_takes_caches_along(llm: QCFuseLLM) -> None:
    ingestion = Ingestion(llm, "vector store", DocstoreStrategy.UPSERTS_AND_DELETE)
    ingestion.run(a=[FERRY, HULL], b=[HULL, MILL])
    ingestion.run(b=[HULL, MILL])
    assert stored(llm) == {HULL, MILL}
    assert llm.engine.sources.names() == ["b"]


async def test_an_asynchronous_pipeline_takes_caches_along(llm: QCFuseLLM) -> None:
    ingestion = Ingestion(llm, "vector store", DocstoreStrategy.UPSERTS_AND_DELETE)
    await ingestion.pipeline.arun(documents=[document("a", FERRY), document("b", HULL)])
    await ingestion.pipeline.arun(documents=[document("b", MILL)])
    assert stored(llm) == {MILL}


@pytest.mark.parametrize("kind", [SimpleVectorStore, TextStore, SilentStore])
def test_an_index_warms_what_is_inserted_and_forgets_what_is_deleted(
    llm: QCFuseLLM, kind: type[BasePydanticVectorStore]
) -> None:
    index = vector_index(QCFuseVectorStore(kind(), llm), document("a", FERRY, HULL), document("b", HULL))
    assert stored(llm) == {FERRY, HULL}
    index.insert(document("c", MILL))
    assert stored(llm) == {FERRY, HULL, MILL}
    index.delete_ref_doc("a")
    assert stored(llm) == {HULL, MILL}
    index.update_ref_doc(document("c", HARBOUR))
    assert stored(llm) == {HULL, HARBOUR}
    index.refresh_ref_docs([document("b", MILL), document("c", HARBOUR)])
    assert stored(llm) == {MILL, HARBOUR}


async def test_an_index_is_asynchronous_too(llm: QCFuseLLM) -> None:
    index = vector_index(QCFuseVectorStore(TextStore(), llm), document("a", FERRY), document("b", HULL))
    await index.ainsert(document("c", MILL))
    assert stored(llm) == {FERRY, HULL, MILL}
    await index.adelete_ref_doc("a")
    assert stored(llm) == {HULL, MILL}
    [node] = [node for node in await index.vector_store.aget_nodes() if node.ref_doc_id == "b"]
    await index.adelete_nodes([node.node_id])
    assert stored(llm) == {MILL}
    await index.vector_store.aclear()
    assert stored(llm) == set()


def test_nodes_of_a_document_that_are_added_one_by_one_all_stay(llm: QCFuseLLM) -> None:
    store = QCFuseVectorStore(SimpleVectorStore(), llm)
    index = vector_index(store)
    for node in splitter().get_nodes_from_documents([document("a", FERRY, HULL)]):
        index.insert_nodes([node])
    assert stored(llm) == {FERRY, HULL}
    index.delete_ref_doc("a")
    assert stored(llm) == set()


def test_deleted_nodes_take_their_passages_along_where_the_store_knows_them(llm: QCFuseLLM) -> None:
    store = QCFuseVectorStore(TextStore(), llm)
    index = vector_index(store, document("a", FERRY, HULL), document("b", HULL))
    nodes = {(node.ref_doc_id, node.get_content()): node.node_id for node in store.get_nodes()}
    index.delete_nodes([nodes["a", HULL]])
    assert stored(llm) == {FERRY, HULL}, "b still has the hull"
    index.delete_nodes([nodes["b", HULL]])
    assert stored(llm) == {FERRY}
    store.delete_nodes([])
    assert stored(llm) == {FERRY}


def test_the_simple_store_lets_passages_go_with_their_documents_last_node(llm: QCFuseLLM) -> None:
    index = vector_index(QCFuseVectorStore(SimpleVectorStore(), llm), document("a", FERRY, HULL), document("b", MILL))
    first, second = (node for node in index.index_struct.nodes_dict if index.docstore.get_node(node).ref_doc_id == "a")
    index.delete_nodes([first])
    assert stored(llm) == {FERRY, HULL, MILL}
    index.delete_nodes([second])
    assert stored(llm) == {MILL}


def test_a_store_that_returns_no_nodes_keeps_passages_until_the_document_goes(llm: QCFuseLLM) -> None:
    store = SilentStore()
    index = vector_index(QCFuseVectorStore(store, llm), document("a", FERRY))
    index.delete_nodes(list(store.nodes))
    assert stored(llm) == {FERRY}
    index.delete_ref_doc("a")
    assert stored(llm) == set()


@pytest.mark.parametrize("kind", [SimpleVectorStore, TextStore])
def test_clearing_forgets_the_stores_documents_and_no_others(
    llm: QCFuseLLM, kind: type[BasePydanticVectorStore]
) -> None:
    llm.engine.warm([MILL], sources=["elsewhere"])
    store = QCFuseVectorStore(kind(), llm)
    vector_index(store, document("a", FERRY), document("b", HULL))
    store.add([TextNode(text=HARBOUR, id_="alone", embedding=[0.0] * 4)])
    assert stored(llm) == {FERRY, HULL, MILL, HARBOUR}
    store.clear()
    assert stored(llm) == {MILL}


def test_clearing_a_store_that_cannot_name_its_documents_is_refused(llm: QCFuseLLM) -> None:
    store = SilentStore()
    vector_index(QCFuseVectorStore(store, llm), document("a", FERRY))
    with pytest.raises(QCFuseError, match="SilentStore cannot say which documents it has"):
        QCFuseVectorStore(store, llm).clear()
    assert stored(llm) == {FERRY}
    assert store.nodes


def test_a_wrapped_store_is_queried_and_persisted_like_the_one_inside(
    llm: QCFuseLLM, tmp_path: Path, lookups: list[dict[str, Any]]
) -> None:
    index = vector_index(QCFuseVectorStore(SimpleVectorStore(), llm), document("a", *PASSAGES))
    engine = index.as_query_engine(llm=llm, similarity_top_k=3, response_synthesizer=QCFuseSynthesizer(llm))
    assert len(engine.query(QUESTION).source_nodes) == 3
    assert [lookup["hit"] for lookup in lookups] == [True] * 4
    index.storage_context.persist(str(tmp_path))
    again = SimpleVectorStore.from_persist_dir(str(tmp_path))
    assert again.data.text_id_to_ref_doc_id == index.vector_store.vector_store.data.text_id_to_ref_doc_id


@both_ways
def test_sweeping_forgets_what_a_pipelines_docstore_no_longer_has(llm: QCFuseLLM, way: str) -> None:
    ingestion = Ingestion(llm, way)
    ingestion.run(a=[FERRY, HULL], b=[HULL, MILL])
    assert forget_missing(llm, ingestion.docstore) == []
    ingestion.docstore.delete_document("a")
    assert forget_missing(llm, ingestion.docstore) == ["a"]
    assert stored(llm) == {HULL, MILL}
    assert forget_missing(llm.engine, ingestion.docstore) == []


def test_sweeping_forgets_what_an_indexs_docstore_no_longer_has(llm: QCFuseLLM) -> None:
    index = SummaryIndex.from_documents(
        [document("a", FERRY, HULL), document("b", HULL, MILL)], transformations=[splitter(), QCFuseWarmup(llm)]
    )
    index.delete_ref_doc("a")
    assert forget_missing(llm, index.docstore) == [], "its nodes are still in the docstore"
    index.delete_ref_doc("b", delete_from_docstore=True)
    assert forget_missing(llm, index.docstore) == ["b"]
    assert stored(llm) == {FERRY, HULL}


def test_sweeping_tells_equal_documents_apart_and_takes_several_docstores(llm: QCFuseLLM) -> None:
    ingestion, other = Ingestion(llm, "transform"), Ingestion(llm, "transform")
    ingestion.run(a=[FERRY], b=[FERRY])
    other.run(c=[MILL])
    assert forget_missing(llm, ingestion.docstore, other.docstore) == []
    assert forget_missing(llm, ingestion.docstore) == ["c"]


def test_sweeping_with_an_empty_docstore_is_refused(llm: QCFuseLLM) -> None:
    assert forget_missing(llm, SimpleDocumentStore()) == [], "nothing to forget"
    Ingestion(llm, "transform").run(a=[FERRY])
    with pytest.raises(QCFuseError, match="the docstore has no documents, so all would be forgotten"):
        forget_missing(llm, SimpleDocumentStore())
    assert stored(llm) == {FERRY}


def test_a_persisted_index_can_be_warmed_and_answers_from_the_store(
    llm: QCFuseLLM, tmp_path: Path, lookups: list[dict[str, Any]]
) -> None:
    documents = [Document(text=text, id_=f"{i}", metadata={"page": i}) for i, text in enumerate(PASSAGES)]
    vector_index(SimpleVectorStore(), *documents).storage_context.persist(str(tmp_path))
    sources, texts = zip(*read_index(tmp_path), strict=True)
    assert sources == ("0", "1", "2")
    assert texts[0].startswith("page: 0")
    assert llm.engine.warm(texts, sources=sources).warmed == 3
    index = load_index_from_storage(StorageContext.from_defaults(persist_dir=str(tmp_path)), embed_model=EMBED)
    engine = index.as_query_engine(llm=llm, similarity_top_k=3, response_synthesizer=QCFuseSynthesizer(llm))
    engine.query(QUESTION)
    assert [lookup["hit"] for lookup in lookups] == [True] * 4


def test_reading_leaves_out_what_was_deleted_from_the_index(tmp_path: Path) -> None:
    index = vector_index(SimpleVectorStore(), document("a", FERRY), document("b", HULL, MILL))
    index.delete_ref_doc("a")
    index.storage_context.persist(str(tmp_path))
    assert list(read_index(tmp_path)) == [("b", HULL), ("b", MILL)]


def test_reading_another_kind_of_index_leaves_out_documents_that_were_split(tmp_path: Path) -> None:
    split, whole = document("a", FERRY, HULL), document("b", MILL)
    context = StorageContext.from_defaults()
    context.docstore.add_documents([split, whole])  # as where a pipeline shares the index's docstore
    SummaryIndex([*splitter().get_nodes_from_documents([split]), whole], storage_context=context)
    context.persist(str(tmp_path))
    assert sorted(read_index(tmp_path)) == [("a", HULL), ("a", FERRY), ("b", MILL)]


def test_reading_what_is_no_index_says_what_to_give(llm: QCFuseLLM, tmp_path: Path) -> None:
    with pytest.raises(QCFuseError, match=r"no LlamaIndex index in .*missing"):
        read_index(tmp_path / "missing")
    ingestion = Ingestion(llm, "transform")
    ingestion.run(a=[FERRY])
    ingestion.pipeline.persist(str(tmp_path / "pipeline"))
    with pytest.raises(QCFuseError, match="not an ingestion pipeline's"):
        read_index(tmp_path / "pipeline")
    vector_index(TextStore(), document("a", FERRY)).storage_context.persist(str(tmp_path / "elsewhere"))
    with pytest.raises(QCFuseError, match="if its vector store holds the text"):
        read_index(tmp_path / "elsewhere")
    (tmp_path / "pipeline" / "docstore.json").write_text("[")
    with pytest.raises(QCFuseError, match="no LlamaIndex index"):
        read_index(tmp_path / "pipeline")


def test_the_reader_is_an_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    [(name, value)] = project["entry-points"]["qcfuse_rag.readers"].items()
    assert (name, EntryPoint(name, value, "qcfuse_rag.readers").load()) == ("llama-index", read_index)
