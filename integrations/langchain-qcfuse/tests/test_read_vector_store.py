"""Read dumped LangChain vector stores, to warm them."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_qcfuse import ChatQCFuse, QCFuseVectorStore, read_vector_store
from qcfuse_rag import QCFuseError
from tests.support.langchain_documents import EMBED, documents
from tests.support.library import FERRY, HULL, MILL, stored
from tests.support.passages import QUESTION


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
    assert stored(chat.engine) == {HULL}


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
