"""Read persisted LlamaIndex indexes, to warm them."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, SummaryIndex, load_index_from_storage
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseSynthesizer, read_index
from qcfuse_rag import QCFuseError
from tests.support.library import FERRY, HULL, MILL
from tests.support.llama_index_documents import EMBED, TextStore, document, hits, splitter, vector_index
from tests.support.passages import PASSAGES, QUESTION


def test_a_persisted_index_can_be_warmed_and_answers_from_the_store(
    llm: QCFuseLLM, tmp_path: Path, reports: list[dict[str, Any]]
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
    assert hits(reports) == [3]


def test_reading_leaves_out_what_was_deleted_from_the_index(tmp_path: Path) -> None:
    index = vector_index(SimpleVectorStore(), document("a", FERRY), document("b", HULL, MILL))
    index.delete_ref_doc("a")
    index.storage_context.persist(str(tmp_path))
    assert list(read_index(tmp_path)) == [("b", HULL), ("b", MILL)]


def test_reading_another_kind_of_index_leaves_out_documents_that_were_split(tmp_path: Path) -> None:
    split, unsplit = document("a", FERRY, HULL), document("b", MILL)
    context = StorageContext.from_defaults()
    context.docstore.add_documents([split, unsplit])  # as where a pipeline shares the index's docstore
    SummaryIndex([*splitter().get_nodes_from_documents([split]), unsplit], storage_context=context)
    context.persist(str(tmp_path))
    assert sorted(read_index(tmp_path)) == [("a", HULL), ("a", FERRY), ("b", MILL)]


def test_reading_anything_but_an_index_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(QCFuseError, match=r"no LlamaIndex index in .*missing"):
        read_index(tmp_path / "missing")
    pipeline = IngestionPipeline(
        transformations=[splitter()],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.DUPLICATES_ONLY,
    )
    pipeline.run(documents=[document("a", FERRY)])
    pipeline.persist(str(tmp_path / "pipeline"))
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
