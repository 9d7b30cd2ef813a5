"""LlamaIndex's own indexes over any vector store: caches follow changed and deleted documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseSynthesizer, QCFuseVectorStore
from qcfuse_rag import QCFuseError
from tests.support.library import FERRY, HARBOUR, HULL, MILL, stored
from tests.support.llama_index_documents import TextStore, document, hits, splitter, vector_index
from tests.support.passages import PASSAGES, QUESTION


class SilentStore(TextStore):
    """A vector store that cannot return nodes."""

    def get_nodes(self, *args: Any, **kwargs: Any) -> list[BaseNode]:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [SimpleVectorStore, TextStore, SilentStore])
def test_an_index_warms_what_is_inserted_and_forgets_what_is_deleted(
    llm: QCFuseLLM, kind: type[BasePydanticVectorStore]
) -> None:
    index = vector_index(QCFuseVectorStore(kind(), llm), document("a", FERRY, HULL), document("b", HULL))
    assert stored(llm.engine) == {FERRY, HULL}
    index.insert(document("c", MILL))
    assert stored(llm.engine) == {FERRY, HULL, MILL}
    index.delete_ref_doc("a")
    assert stored(llm.engine) == {HULL, MILL}
    index.update_ref_doc(document("c", HARBOUR))
    assert stored(llm.engine) == {HULL, HARBOUR}
    index.refresh_ref_docs([document("b", MILL), document("c", HARBOUR)])
    assert stored(llm.engine) == {MILL, HARBOUR}


async def test_an_index_is_asynchronous_too(llm: QCFuseLLM) -> None:
    index = vector_index(QCFuseVectorStore(TextStore(), llm), document("a", FERRY), document("b", HULL))
    await index.ainsert(document("c", MILL))
    assert stored(llm.engine) == {FERRY, HULL, MILL}
    await index.adelete_ref_doc("a")
    assert stored(llm.engine) == {HULL, MILL}
    [node] = [node for node in await index.vector_store.aget_nodes() if node.ref_doc_id == "b"]
    await index.adelete_nodes([node.node_id])
    assert stored(llm.engine) == {MILL}
    await index.vector_store.aclear()
    assert stored(llm.engine) == set()


def test_nodes_of_a_document_that_are_added_one_by_one_all_stay(llm: QCFuseLLM) -> None:
    store = QCFuseVectorStore(SimpleVectorStore(), llm)
    index = vector_index(store)
    for node in splitter().get_nodes_from_documents([document("a", FERRY, HULL)]):
        index.insert_nodes([node])
    assert stored(llm.engine) == {FERRY, HULL}
    index.delete_ref_doc("a")
    assert stored(llm.engine) == set()


def test_deleted_nodes_take_their_passages_along_where_the_store_knows_them(llm: QCFuseLLM) -> None:
    store = QCFuseVectorStore(TextStore(), llm)
    index = vector_index(store, document("a", FERRY, HULL), document("b", HULL))
    nodes = {(node.ref_doc_id, node.get_content()): node.node_id for node in store.get_nodes()}
    index.delete_nodes([nodes["a", HULL]])
    assert stored(llm.engine) == {FERRY, HULL}, "b still has the hull"
    index.delete_nodes([nodes["b", HULL]])
    assert stored(llm.engine) == {FERRY}
    store.delete_nodes([])
    assert stored(llm.engine) == {FERRY}


def test_with_the_simple_store_passages_go_with_their_documents_last_node(llm: QCFuseLLM) -> None:
    index = vector_index(QCFuseVectorStore(SimpleVectorStore(), llm), document("a", FERRY, HULL), document("b", MILL))
    first, second = (node for node in index.index_struct.nodes_dict if index.docstore.get_node(node).ref_doc_id == "a")
    index.delete_nodes([first])
    assert stored(llm.engine) == {FERRY, HULL, MILL}
    index.delete_nodes([second])
    assert stored(llm.engine) == {MILL}


def test_a_store_that_returns_no_nodes_keeps_passages_until_the_document_goes(llm: QCFuseLLM) -> None:
    store = SilentStore()
    index = vector_index(QCFuseVectorStore(store, llm), document("a", FERRY))
    index.delete_nodes(list(store.nodes))
    assert stored(llm.engine) == {FERRY}
    index.delete_ref_doc("a")
    assert stored(llm.engine) == set()


@pytest.mark.parametrize("kind", [SimpleVectorStore, TextStore])
def test_clearing_forgets_the_stores_documents_and_no_others(
    llm: QCFuseLLM, kind: type[BasePydanticVectorStore]
) -> None:
    llm.engine.warm([MILL], sources=["elsewhere"])
    store = QCFuseVectorStore(kind(), llm)
    vector_index(store, document("a", FERRY), document("b", HULL))
    store.add([TextNode(text=HARBOUR, id_="alone", embedding=[0.0] * 4)])
    assert stored(llm.engine) == {FERRY, HULL, MILL, HARBOUR}
    store.clear()
    assert stored(llm.engine) == {MILL}


def test_clearing_a_store_that_cannot_name_its_documents_is_refused(llm: QCFuseLLM) -> None:
    store = SilentStore()
    vector_index(QCFuseVectorStore(store, llm), document("a", FERRY))
    with pytest.raises(QCFuseError, match="SilentStore cannot list its documents"):
        QCFuseVectorStore(store, llm).clear()
    assert stored(llm.engine) == {FERRY}
    assert store.nodes


def test_a_wrapped_store_is_queried_and_persisted_like_the_one_inside(
    llm: QCFuseLLM, tmp_path: Path, reports: list[dict[str, Any]]
) -> None:
    index = vector_index(QCFuseVectorStore(SimpleVectorStore(), llm), document("a", *PASSAGES))
    engine = index.as_query_engine(llm=llm, similarity_top_k=3, response_synthesizer=QCFuseSynthesizer(llm))
    assert len(engine.query(QUESTION).source_nodes) == 3
    assert hits(reports) == [3]
    index.storage_context.persist(str(tmp_path))
    again = SimpleVectorStore.from_persist_dir(str(tmp_path))
    assert again.data.text_id_to_ref_doc_id == index.vector_store.vector_store.data.text_id_to_ref_doc_id
