"""LangChain's own chains, agents and graphs with only the model replaced: warmed documents are found."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import weakref
from typing import Any

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages.content import create_plaintext_block, create_text_block
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_qcfuse import ChatQCFuse, QCFusePrefetch, QCFuseVectorStore
from qcfuse_rag import LanguageModel, MemoryStore
from qcfuse_rag.store.key import FRAMED
from tests.support.engines import make_engine
from tests.support.langchain_documents import EMBED
from tests.support.passages import PASSAGES, QUESTION

DOCUMENTS = [Document(page_content=text, metadata={"page": i}) for i, text in enumerate(PASSAGES)]
INPUTS = {"input": QUESTION, "context": DOCUMENTS}
PROMPT = ChatPromptTemplate.from_messages([("system", "Answer from the context.\n\n{context}"), ("human", "{input}")])


@pytest.fixture
def chat(chat: ChatQCFuse) -> ChatQCFuse:
    chat.warm(DOCUMENTS)
    return chat


def hits(message: Any) -> list[bool]:
    """Return which documents of a message's prompt were reused."""
    report = message.response_metadata["fusion"]
    return [lookup["hit"] for lookup in report["lookups"] if lookup["role"] == "chunk"]


def recorder(messages: list[Any]) -> RunnableLambda[Any, Any]:
    """Return a step of a chain that records the model's message."""

    def record(message: Any) -> str:
        messages.append(message)
        return str(message.content)

    return RunnableLambda(record)


@pytest.mark.parametrize("separator", ["\n\n", "\n---\n", " | "])
def test_a_stuff_chain_reuses_every_document(chat: ChatQCFuse, separator: str) -> None:
    messages: list[Any] = []
    chain = create_stuff_documents_chain(chat, PROMPT, output_parser=recorder(messages), document_separator=separator)
    assert chain.invoke(INPUTS)
    assert hits(messages[0]) == [True] * 3


def test_documents_that_a_chain_decorates(chat: ChatQCFuse) -> None:
    messages: list[Any] = []
    decorated = PromptTemplate.from_template("[page {page}]\n{page_content}")
    chain = create_stuff_documents_chain(chat, PROMPT, output_parser=recorder(messages), document_prompt=decorated)
    assert chain.invoke(INPUTS)
    assert hits(messages[0]) == [True] * 3


def test_documents_as_content_blocks(chat: ChatQCFuse) -> None:
    blocks = [create_plaintext_block(text=document.page_content) for document in DOCUMENTS]
    message = chat.invoke([HumanMessage(content_blocks=[*blocks, create_text_block(QUESTION)])])
    assert hits(message) == [True] * 3
    assert message.content == chat.invoke(QUESTION, documents=DOCUMENTS).content


def test_documents_of_an_earlier_turn_are_still_shown(chat: ChatQCFuse) -> None:
    first = HumanMessage(content_blocks=[create_plaintext_block(text=PASSAGES[0]), create_text_block(QUESTION)])
    assert hits(chat.invoke([first, AIMessage("The school."), HumanMessage("And where?")])) == [True]
    with pytest.raises(ValueError, match="needs its text"):
        chat.invoke([HumanMessage(content=[{"type": "text-plain", "url": "https://example.com/a.txt"}])])


async def test_batches_and_events(chat: ChatQCFuse) -> None:
    chain = create_stuff_documents_chain(chat, PROMPT)
    assert await chain.abatch([INPUTS] * 3) == [chain.invoke(INPUTS)] * 3
    events = [event async for event in chat.astream_events("Why?", version="v2")]
    assert {"on_chat_model_start", "on_chat_model_stream", "on_chat_model_end"} <= {event["event"] for event in events}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_retriever_that_prefetches(
    chat: ChatQCFuse, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    prefetched: list[list[str]] = []
    monkeypatch.setattr(chat.engine.corpus, "prefetch", prefetched.append)
    base = InMemoryVectorStore.from_documents(DOCUMENTS, EMBED).as_retriever()
    retriever = ContextualCompressionRetriever(base_compressor=QCFusePrefetch(chat=chat), base_retriever=base)
    found = await retriever.ainvoke(QUESTION) if asynchronous else retriever.invoke(QUESTION)
    assert [document.page_content for document in found] == prefetched[0]
    assert sorted(prefetched[0]) == sorted(PASSAGES)


@pytest.mark.parametrize("how", ["warmed", "added", "made of documents"])
def test_access_tags_come_from_metadata(lm: LanguageModel, how: str) -> None:
    chat = ChatQCFuse.from_engine(make_engine(lm, MemoryStore()))
    documents = [Document(text, id=f"{i}", metadata={} if i else {"group": "board"}) for i, text in enumerate(PASSAGES)]
    if how == "made of documents":
        store = QCFuseVectorStore.from_documents(documents, EMBED, chat=chat, access_key="group")
        store.add_documents([Document(PASSAGES[0], id="0")])  # without the key: the tag stays
    elif how == "added":
        store = QCFuseVectorStore(InMemoryVectorStore(EMBED), chat, access_key="group")
        store.add_documents(documents)
    else:
        chat.warm(documents, access_key="group")
    engine = chat.engine
    readers = [
        engine.corpus.open_sources().readers(*engine.corpus.keys(engine.prompts.chunk_ids(text), (FRAMED,)))
        for text in PASSAGES
    ]
    assert readers == [{"board"}, {""}, {""}]


async def test_a_task_that_is_cancelled_before_it_is_queued_leaves_nothing_behind(
    chat: ChatQCFuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, resume = threading.Event(), threading.Event()
    prompt_from_text = chat.engine.prompt_from_text

    def slow(*args: Any, **options: Any) -> Any:
        started.set()
        resume.wait(10)
        return prompt_from_text(*args, **options)

    monkeypatch.setattr(chat.engine, "prompt_from_text", slow)
    prefilled: list[Any] = []
    chat.engine.observe(prefilled.append)
    task = asyncio.create_task(chat.model_copy(update={"max_tokens": 400}).ainvoke("The ferry"))
    while not started.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    resume.set()
    scheduler = chat._current_handle().scheduler
    for _ in range(400):
        await asyncio.sleep(0.005)
        if not scheduler.active and not scheduler.waiting:
            break
    assert scheduler.active == scheduler.waiting == 0


def test_a_dropped_chat_model_frees_its_engine(lm: LanguageModel) -> None:
    chat = ChatQCFuse.from_engine(make_engine(lm, MemoryStore()), max_tokens=2)
    chat.invoke("The ferry")
    engine, scheduler = weakref.ref(chat.engine), chat._current_handle().scheduler
    thread = scheduler._thread
    del chat, scheduler
    gc.collect()
    thread.join(10)
    gc.collect()
    assert not thread.is_alive()
    assert engine() is None


def test_copies_share_the_model(chat: ChatQCFuse) -> None:
    assert copy.deepcopy(chat).engine is chat.engine


async def test_a_cancelled_task_ends_its_request_and_no_other(chat: ChatQCFuse) -> None:
    long = chat.model_copy(update={"max_tokens": 400})
    task = asyncio.create_task(long.ainvoke("The ferry"))
    scheduler = chat._current_handle().scheduler
    while not scheduler.active:
        await asyncio.sleep(0.001)
    other = asyncio.create_task(chat.ainvoke("The mill"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await other).content
    for _ in range(2000):
        if not scheduler.active and not scheduler.waiting:
            break
        await asyncio.sleep(0.002)
    assert scheduler.active == 0
