"""A wrapped vector store behaves like the inner store, and passages come and go with its documents."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_qcfuse import ChatQCFuse, QCFuseVectorStore
from qcfuse_rag import QCFuseError
from tests.support.langchain_documents import EMBED, documents
from tests.support.library import FERRY, HARBOUR, HULL, MILL, stored
from tests.support.passages import PASSAGES, QUESTION

INHERITED = {"add_texts", "aadd_texts", "as_retriever", "from_documents", "afrom_documents", "afrom_texts"}


def test_all_other_methods_are_the_wrapped_stores() -> None:
    public = {name for name, value in vars(VectorStore).items() if not name.startswith("_")}
    assert public - set(vars(QCFuseVectorStore)) == INHERITED, "new in LangChain: decide what it does here"


async def test_searches_give_what_the_wrapped_store_gives(chat: ChatQCFuse) -> None:
    store = QCFuseVectorStore(InMemoryVectorStore(EMBED), chat)
    ids = store.add_texts(PASSAGES, [{"n": i} for i in range(3)], ids=["x", "y", "z"])
    inner, vector = store.vector_store, EMBED.embed_query(QUESTION)
    assert ids == ["x", "y", "z"]
    assert store.embeddings is EMBED
    assert store.get_by_ids(["y"]) == await store.aget_by_ids(["y"]) == inner.get_by_ids(["y"])
    assert store.similarity_search(QUESTION, k=2) == await store.asimilarity_search(QUESTION, k=2)
    assert store.similarity_search(QUESTION, k=2) == inner.similarity_search(QUESTION, k=2)
    assert store.similarity_search_with_score(QUESTION) == inner.similarity_search_with_score(QUESTION)
    assert store.similarity_search_by_vector(vector) == inner.similarity_search_by_vector(vector)
    assert store.max_marginal_relevance_search(QUESTION, k=1) == inner.max_marginal_relevance_search(QUESTION, k=1)
    assert await store.asearch(QUESTION, "mmr") == inner.search(QUESTION, "mmr")
    assert await store.as_retriever().ainvoke(QUESTION) == inner.similarity_search(QUESTION)


async def test_documents_are_warmed_however_they_are_added(chat: ChatQCFuse) -> None:
    store = QCFuseVectorStore(InMemoryVectorStore(EMBED), chat)
    [random_id] = store.add_texts([FERRY])
    await store.aadd_texts([HULL], ids=["hull"])
    await store.as_retriever().aadd_documents([Document(MILL, id="mill"), Document(HARBOUR)])
    assert stored(chat.engine) == {FERRY, HULL, MILL, HARBOUR}
    store.delete([random_id, "hull"])
    await store.adelete(["mill"])
    assert stored(chat.engine) == {HARBOUR}
    assert [document.page_content for document in store.similarity_search(QUESTION)] == [HARBOUR]


def test_given_ids_count_whatever_the_wrapped_store_returns(chat: ChatQCFuse) -> None:
    class Silent(InMemoryVectorStore):
        def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
            super().add_documents(documents, **kwargs)
            return []

    store = QCFuseVectorStore(Silent(EMBED), chat)
    store.add_documents([Document(FERRY)], ids=["x"])
    store.add_documents([Document(HULL, id="y")])
    store.delete(["x", "y"])
    assert stored(chat.engine) == set()


def test_adding_under_an_id_that_is_there_replaces_its_passage(chat: ChatQCFuse) -> None:
    store = QCFuseVectorStore(InMemoryVectorStore(EMBED), chat)
    store.add_documents([Document(FERRY, id="x")])
    store.add_documents([Document(HULL, id="x")])
    assert stored(chat.engine) == {HULL}


async def test_a_store_is_made_of_documents_and_warmed(chat: ChatQCFuse) -> None:
    store = QCFuseVectorStore.from_documents(documents(a=[FERRY], b=[HULL]), EMBED, chat=chat)
    named = await QCFuseVectorStore.afrom_texts([MILL], EMBED, ids=["mill"], chat=chat)
    assert stored(chat.engine) == {FERRY, HULL, MILL}
    store.delete([document.id for document in store.similarity_search(QUESTION) if document.page_content == FERRY])
    named.delete(["mill"])
    assert stored(chat.engine) == {HULL}


async def test_deleting_without_ids_is_refused(chat: ChatQCFuse) -> None:
    store = QCFuseVectorStore(InMemoryVectorStore(EMBED), chat)
    with pytest.raises(QCFuseError, match="name the ids"):
        store.delete()
    with pytest.raises(QCFuseError, match="name the ids"):
        await store.adelete()


def test_warming_notes_the_source_of_a_document(chat: ChatQCFuse) -> None:
    chat.warm([*documents(a=[FERRY]), Document(HULL, id="b"), Document(MILL)])
    assert stored(chat.engine) == {FERRY, HULL, MILL}
    assert chat.engine.corpus.open_sources().names() == ["a", "b"]
    chat.engine.forget("a")
    chat.engine.forget("b")
    assert stored(chat.engine) == {MILL}


def test_warming_some_documents_of_a_source_takes_nothing_from_the_others(chat: ChatQCFuse) -> None:
    chat.warm(documents(a=[FERRY, HULL]))
    chat.warm(documents(a=[FERRY]))
    assert stored(chat.engine) == {FERRY, HULL}
    chat.warm(documents(a=[FERRY, MILL]), replace=True)
    assert stored(chat.engine) == {FERRY, MILL}


def test_the_key_of_sources_can_be_another_or_none(chat: ChatQCFuse) -> None:
    chat.warm([Document(FERRY, id="x", metadata={"source": "a", "file": 7})], source_key="file")
    chat.warm([Document(FERRY, id="x", metadata={"source": "a", "file": 7})], source_key=None)
    assert chat.engine.corpus.open_sources().names() == ["7", "x"]
