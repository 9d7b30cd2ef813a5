"""Changed and deleted documents take their caches along, in LangChain's own indexing."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import IndexingResult, InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_qcfuse import ChatQCFuse, QCFuseVectorStore, create_qcfuse_chain, read_vector_store
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, QCFuseError, WarmSummary
from tests.conftest import PASSAGES, QUESTION
from tests.families import build_model, build_tokenizer

FERRY, HULL, MILL = PASSAGES
HARBOUR = "The harbour master lives above the bakery. She reads the tide tables aloud at noon to whoever asks."
EMBED = DeterministicFakeEmbedding(size=4)
INHERITED = {"add_texts", "aadd_texts", "as_retriever", "from_documents", "afrom_documents", "afrom_texts"}

Cleanup = Literal["incremental", "full", "scoped_full"]
every_cleanup = pytest.mark.parametrize("cleanup", ["incremental", "full", "scoped_full"])


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel.wrap(build_model("llama"), build_tokenizer(lambda: PASSAGES))


@pytest.fixture
def chat(lm: LanguageModel) -> Iterator[ChatQCFuse]:
    with FusionEngine(lm, MemoryStore()) as engine:
        yield ChatQCFuse.from_engine(engine, max_tokens=4)


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

    def __init__(self, chat: ChatQCFuse, cleanup: Cleanup | None, batch_size: int = 100) -> None:
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


def documents(**texts: Sequence[str]) -> list[Document]:
    """Return the pieces of each source."""
    return [Document(text, metadata={"source": source}) for source, pieces in texts.items() for text in pieces]


def stored(chat: ChatQCFuse, among: Sequence[str] = (FERRY, HULL, MILL, HARBOUR)) -> set[str]:
    """Return which passages' caches are in the store."""
    engine = chat.engine
    base = engine.method.base
    assert base is not None
    keys = {text: engine.keys(engine.prompts.chunk_ids(text), [base])[0] for text in among}
    return {text for text, key in keys.items() if key in engine.store}


@every_cleanup
def test_a_changed_source_takes_its_stale_passages_along_and_no_others(chat: ChatQCFuse, cleanup: Cleanup) -> None:
    indexing = Indexing(chat, cleanup)
    assert indexing.run(a=[FERRY, HULL], b=[HULL, MILL])["num_added"] == 4
    assert stored(chat) == {FERRY, HULL, MILL}
    indexing.run(a=[FERRY, HARBOUR], b=[HULL, MILL])
    assert stored(chat) == {FERRY, HULL, MILL, HARBOUR}, "b still has the hull"
    indexing.run(a=[FERRY, HARBOUR], b=[MILL])
    assert stored(chat) == {FERRY, MILL, HARBOUR}


def test_a_removed_source_goes_with_a_full_cleanup(chat: ChatQCFuse) -> None:
    indexing = Indexing(chat, "full")
    indexing.run(a=[FERRY, HULL], b=[HULL, MILL])
    indexing.run(b=[HULL, MILL])
    assert stored(chat) == {HULL, MILL}
    assert indexing.run()["num_deleted"] == 2
    assert stored(chat) == set()
    assert chat.engine.sources.names() == []


@pytest.mark.parametrize("cleanup", ["incremental", "scoped_full"])
def test_sources_that_do_not_come_stay_with_the_other_cleanups(chat: ChatQCFuse, cleanup: Cleanup) -> None:
    indexing = Indexing(chat, cleanup)
    indexing.run(a=[FERRY], b=[MILL])
    indexing.run(b=[HULL])
    assert stored(chat) == {FERRY, HULL}


def test_without_a_cleanup_nothing_goes(chat: ChatQCFuse) -> None:
    indexing = Indexing(chat, None)
    indexing.run(a=[FERRY])
    indexing.run(a=[HULL])
    assert stored(chat) == {FERRY, HULL}


@every_cleanup
def test_unchanged_documents_are_not_prefilled_again(chat: ChatQCFuse, cleanup: Cleanup, prefilled: list[int]) -> None:
    indexing = Indexing(chat, cleanup)
    indexing.run(a=[FERRY, HULL], b=[MILL])
    assert indexing.run(a=[FERRY, HULL], b=[MILL])["num_skipped"] == 3
    indexing.run(a=[FERRY, HULL, HARBOUR], b=[MILL])
    assert prefilled == [3, 1]
    assert stored(chat) == {FERRY, HULL, MILL, HARBOUR}


@every_cleanup
def test_a_passage_whose_metadata_changed_is_not_prefilled_again(
    chat: ChatQCFuse, cleanup: Cleanup, prefilled: list[int]
) -> None:
    indexing = Indexing(chat, cleanup)
    for page in (1, 2):
        pages = [Document(FERRY, metadata={"source": "a", "page": page})]
        index(pages, indexing.records, indexing.store, **indexing.options)
    assert prefilled == [1, 0], "it has another id, and the new one is added before the old one is deleted"
    assert stored(chat) == {FERRY}


@every_cleanup
@pytest.mark.parametrize("batch_size", [1, 2])
def test_batches_may_be_smaller_than_a_source(chat: ChatQCFuse, cleanup: Cleanup, batch_size: int) -> None:
    indexing = Indexing(chat, cleanup, batch_size)
    indexing.run(a=[FERRY, HULL, MILL])
    assert stored(chat) == {FERRY, HULL, MILL}
    indexing.run(a=[FERRY, HARBOUR, MILL])
    assert stored(chat) == {FERRY, HARBOUR, MILL}


def test_a_scoped_cleanup_of_small_batches_prefills_only_what_is_new(chat: ChatQCFuse, prefilled: list[int]) -> None:
    indexing = Indexing(chat, "scoped_full", batch_size=1)
    indexing.run(a=[FERRY, HULL, MILL])
    indexing.run(a=[HARBOUR, FERRY, MILL])
    assert sum(prefilled) == 4


async def test_asynchronous_indexing_does_the_same(chat: ChatQCFuse) -> None:
    indexing = Indexing(chat, "full")
    await indexing.arun(a=[FERRY, HULL], b=[HULL, MILL])
    assert stored(chat) == {FERRY, HULL, MILL}
    await indexing.arun(b=[HULL, HARBOUR])
    assert stored(chat) == {HULL, HARBOUR}


def test_an_index_from_before_is_warmed_by_updating_it(chat: ChatQCFuse) -> None:
    indexing = Indexing(chat, "incremental")
    indexing.run(a=[FERRY])
    chat.engine.store.clear()
    indexing.run(a=[FERRY])
    assert stored(chat) == set(), "the record manager knows it, so the vector store never hears of it"
    index(documents(a=[FERRY]), indexing.records, indexing.store, force_update=True, **indexing.options)
    assert stored(chat) == {FERRY}


def test_a_chain_over_the_wrapped_stores_retriever_finds_every_chunk(chat: ChatQCFuse) -> None:
    indexing = Indexing(chat, "full")
    indexing.run(a=PASSAGES)
    found = indexing.store.as_retriever(search_kwargs={"k": 3}).invoke(QUESTION)
    assert {document.page_content for document in found} == set(PASSAGES)
    message = chat.invoke(QUESTION, documents=found)
    assert [lookup["hit"] for lookup in message.response_metadata["fusion"]["lookups"]] == [True] * 4
    assert create_qcfuse_chain(chat).invoke({"input": QUESTION, "context": found}) == message.content


def test_everything_else_is_the_wrapped_stores_own() -> None:
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
    [drawn] = store.add_texts([FERRY])
    await store.aadd_texts([HULL], ids=["hull"])
    await store.as_retriever().aadd_documents([Document(MILL, id="mill"), Document(HARBOUR)])
    assert stored(chat) == {FERRY, HULL, MILL, HARBOUR}
    store.delete([drawn, "hull"])
    await store.adelete(["mill"])
    assert stored(chat) == {HARBOUR}
    assert [document.page_content for document in store.similarity_search(QUESTION)] == [HARBOUR]


def test_ids_that_were_given_count_whatever_the_wrapped_store_returns(chat: ChatQCFuse) -> None:
    class Silent(InMemoryVectorStore):
        def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
            super().add_documents(documents, **kwargs)
            return []

    store = QCFuseVectorStore(Silent(EMBED), chat)
    store.add_documents([Document(FERRY)], ids=["x"])
    store.add_documents([Document(HULL, id="y")])
    store.delete(["x", "y"])
    assert stored(chat) == set()


def test_adding_under_an_id_that_is_there_replaces_its_passage(chat: ChatQCFuse) -> None:
    store = QCFuseVectorStore(InMemoryVectorStore(EMBED), chat)
    store.add_documents([Document(FERRY, id="x")])
    store.add_documents([Document(HULL, id="x")])
    assert stored(chat) == {HULL}


async def test_a_store_is_made_of_documents_and_warmed(chat: ChatQCFuse) -> None:
    store = QCFuseVectorStore.from_documents(documents(a=[FERRY], b=[HULL]), EMBED, chat=chat)
    named = await QCFuseVectorStore.afrom_texts([MILL], EMBED, ids=["mill"], chat=chat)
    assert stored(chat) == {FERRY, HULL, MILL}
    store.delete([document.id for document in store.similarity_search(QUESTION) if document.page_content == FERRY])
    named.delete(["mill"])
    assert stored(chat) == {HULL}


async def test_deleting_without_ids_is_refused(chat: ChatQCFuse) -> None:
    store = QCFuseVectorStore(InMemoryVectorStore(EMBED), chat)
    with pytest.raises(QCFuseError, match="name the ids"):
        store.delete()
    with pytest.raises(QCFuseError, match="name the ids"):
        await store.adelete()


def test_warming_notes_what_a_document_is_from(chat: ChatQCFuse) -> None:
    chat.warm([*documents(a=[FERRY]), Document(HULL, id="b"), Document(MILL)])
    assert stored(chat) == {FERRY, HULL, MILL}
    assert chat.engine.sources.names() == ["a", "b"]
    chat.engine.forget("a")
    chat.engine.forget("b")
    assert stored(chat) == {MILL}


def test_warming_some_documents_of_a_source_takes_nothing_from_the_others(chat: ChatQCFuse) -> None:
    chat.warm(documents(a=[FERRY, HULL]))
    chat.warm(documents(a=[FERRY]))
    assert stored(chat) == {FERRY, HULL}
    chat.warm(documents(a=[FERRY, MILL]), replace=True)
    assert stored(chat) == {FERRY, MILL}


def test_the_key_of_sources_can_be_another_or_none(chat: ChatQCFuse) -> None:
    chat.warm([Document(FERRY, id="x", metadata={"source": "a", "file": 7})], source_key="file")
    chat.warm([Document(FERRY, id="x", metadata={"source": "a", "file": 7})], source_key=None)
    assert chat.engine.sources.names() == ["7", "x"]


def test_a_dumped_store_can_be_warmed_and_answers_from_the_store(chat: ChatQCFuse, tmp_path: Path) -> None:
    path = str(tmp_path / "store.json")
    inner = InMemoryVectorStore.from_documents([*documents(a=[FERRY, HULL]), Document(MILL, id="m")], EMBED)
    inner.dump(path)
    sources, texts = zip(*read_vector_store(path), strict=True)
    assert list(zip(sources, texts, strict=True)) == [("a", FERRY), ("a", HULL), ("m", MILL)]
    assert chat.engine.warm(texts, sources=sources).warmed == 3
    found = InMemoryVectorStore.load(path, EMBED).similarity_search(QUESTION, k=3)
    message = chat.invoke(QUESTION, documents=found)
    assert [lookup["hit"] for lookup in message.response_metadata["fusion"]["lookups"]] == [True] * 4


def test_what_is_read_by_id_is_deleted_by_the_wrapper(chat: ChatQCFuse, tmp_path: Path) -> None:
    inner = InMemoryVectorStore(EMBED)
    ids = inner.add_documents(documents(a=[FERRY, HULL]))
    inner.dump(str(tmp_path / "store.json"))
    sources, texts = zip(*read_vector_store(tmp_path / "store.json", source_key=None), strict=True)
    assert list(sources) == ids
    chat.engine.warm(texts, sources=sources)
    QCFuseVectorStore(inner, chat).delete(ids[:1])
    assert stored(chat) == {HULL}


@pytest.mark.parametrize("content", [b"\x80\x04\x95pickle", b"{", b"[]", b'{"a": 1}', b'{"a": {"text": "t"}}'])
def test_reading_anything_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index.pkl"
    path.write_bytes(content)
    with pytest.raises(QCFuseError, match="give its documents to `ChatQCFuse"):
        read_vector_store(path)


def test_reading_a_folder_or_nothing_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(QCFuseError, match="is not a JSON file"):
            read_vector_store(path)


def test_reading_makes_no_objects_that_a_file_names(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    other = {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain_core", "messages", "AIMessage"],
        "kwargs": {"content": ""},
    }
    path.write_text(json.dumps({"a": {"id": "a", "text": "t", "metadata": other}}))
    with pytest.raises(QCFuseError):
        read_vector_store(path)


def test_the_reader_is_an_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    [(name, value)] = project["entry-points"]["qcfuse_rag.readers"].items()
    assert (name, EntryPoint(name, value, "qcfuse_rag.readers").load()) == ("langchain", read_vector_store)
