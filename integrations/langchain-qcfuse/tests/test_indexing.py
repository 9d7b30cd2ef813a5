"""LangChain's own indexing: caches follow changed and deleted documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from langchain_core.documents import Document
from langchain_core.indexing import IndexingResult, InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_qcfuse import ChatQCFuse, QCFuseVectorStore, create_qcfuse_chain
from qcfuse_rag import WarmSummary
from tests.support.langchain_documents import EMBED, documents
from tests.support.library import FERRY, HARBOUR, HULL, MILL, stored
from tests.support.passages import PASSAGES, QUESTION

Cleanup = Literal["incremental", "full", "scoped_full"]
every_cleanup = pytest.mark.parametrize("cleanup", ["incremental", "full", "scoped_full"])


@pytest.fixture
def prefilled(chat: ChatQCFuse, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect how many passages each warming prefilled."""
    counts: list[int] = []
    warm = chat.engine.warm

    def counting(*args: Any, **kwargs: Any) -> WarmSummary:
        summary = warm(*args, **kwargs)
        counts.append(summary.warmed)
        return summary

    monkeypatch.setattr(chat.engine, "warm", counting)
    return counts


class Indexing:
    """`index` over a record manager and a wrapped vector store."""

    def __init__(self, chat: ChatQCFuse, cleanup: Cleanup, batch_size: int = 100) -> None:
        self.records = InMemoryRecordManager(namespace="test")
        self.records.create_schema()
        self.store = QCFuseVectorStore(InMemoryVectorStore(EMBED), chat)
        self.options: dict[str, Any] = {
            "cleanup": cleanup,
            "batch_size": batch_size,
            "source_id_key": "source",
            "key_encoder": "sha256",
        }

    def run(self, **texts: Sequence[str]) -> IndexingResult:
        return index(documents(**texts), self.records, self.store, **self.options)

    async def arun(self, **texts: Sequence[str]) -> IndexingResult:
        return await aindex(documents(**texts), self.records, self.store, **self.options)


@every_cleanup
def test_a_changed_source_takes_its_stale_passages_along_and_no_others(chat: ChatQCFuse, cleanup: Cleanup) -> None:
    indexing = Indexing(chat, cleanup)
    assert indexing.run(a=[FERRY, HULL], b=[HULL, MILL])["num_added"] == 4
    assert stored(chat.engine) == {FERRY, HULL, MILL}
    indexing.run(a=[FERRY, HARBOUR], b=[HULL, MILL])
    assert stored(chat.engine) == {FERRY, HULL, MILL, HARBOUR}, "b still has the hull"
    indexing.run(a=[FERRY, HARBOUR], b=[MILL])
    assert stored(chat.engine) == {FERRY, MILL, HARBOUR}


@every_cleanup
def test_unchanged_documents_are_not_prefilled_again(chat: ChatQCFuse, cleanup: Cleanup, prefilled: list[int]) -> None:
    indexing = Indexing(chat, cleanup)
    indexing.run(a=[FERRY, HULL], b=[MILL])
    assert indexing.run(a=[FERRY, HULL], b=[MILL])["num_skipped"] == 3
    indexing.run(a=[FERRY, HULL, HARBOUR], b=[MILL])
    assert prefilled == [3, 1]
    assert stored(chat.engine) == {FERRY, HULL, MILL, HARBOUR}


@every_cleanup
def test_a_passage_whose_metadata_changed_is_not_prefilled_again(
    chat: ChatQCFuse, cleanup: Cleanup, prefilled: list[int]
) -> None:
    indexing = Indexing(chat, cleanup)
    for page in (1, 2):
        pages = [Document(FERRY, metadata={"source": "a", "page": page})]
        index(pages, indexing.records, indexing.store, **indexing.options)
    assert prefilled == [1, 0], "it has another id, and the new one is added before the old one is deleted"
    assert stored(chat.engine) == {FERRY}


def test_a_scoped_cleanup_of_small_batches_prefills_only_what_is_new(chat: ChatQCFuse, prefilled: list[int]) -> None:
    indexing = Indexing(chat, "scoped_full", batch_size=1)
    indexing.run(a=[FERRY, HULL, MILL])
    indexing.run(a=[HARBOUR, FERRY, MILL])
    assert sum(prefilled) == 4
    assert stored(chat.engine) == {FERRY, HARBOUR, MILL}


async def test_asynchronous_indexing_does_the_same(chat: ChatQCFuse) -> None:
    indexing = Indexing(chat, "full")
    await indexing.arun(a=[FERRY, HULL], b=[HULL, MILL])
    assert stored(chat.engine) == {FERRY, HULL, MILL}
    await indexing.arun(b=[HULL, HARBOUR])
    assert stored(chat.engine) == {HULL, HARBOUR}
    assert chat.engine.corpus.open_sources().names() != []
    await indexing.arun()
    assert chat.engine.corpus.open_sources().names() == []


def test_an_index_from_before_is_warmed_by_updating_it(chat: ChatQCFuse) -> None:
    indexing = Indexing(chat, "incremental")
    indexing.run(a=[FERRY])
    chat.engine.store.clear()
    indexing.run(a=[FERRY])
    assert stored(chat.engine) == set(), "the record manager knows it, so it does not reach the vector store"
    index(documents(a=[FERRY]), indexing.records, indexing.store, force_update=True, **indexing.options)
    assert stored(chat.engine) == {FERRY}


def test_a_chain_over_the_wrapped_stores_retriever_finds_every_chunk(chat: ChatQCFuse) -> None:
    indexing = Indexing(chat, "full")
    indexing.run(a=PASSAGES)
    found = indexing.store.as_retriever(search_kwargs={"k": 3}).invoke(QUESTION)
    assert {document.page_content for document in found} == set(PASSAGES)
    message = chat.invoke(QUESTION, documents=found)
    assert [lookup["hit"] for lookup in message.response_metadata["fusion"]["lookups"]] == [True] * 4
    assert create_qcfuse_chain(chat).invoke({"input": QUESTION, "context": found}) == message.content
