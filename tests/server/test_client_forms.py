"""Requests in the form that Open WebUI's and LibreChat's backends send them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.server import idle_warming
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from qcfuse_rag.server.idle_warming import IdleWarming
from qcfuse_rag.server.protocol.chat_request import delimited_passages
from tests.support.engines import make_engine
from tests.support.families import build_model, build_tokenizer
from tests.support.library import stored
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import client, error, post, until
from tests.support.tool_templates import LOOK_UP

CONTEXT = (
    "### Task:\nAnswer with the context, and cite sources as [id].\n\n<context>\n"
    '<source id="1" name="harbour.md">{text}</source>\n</context>\n\n{question}'
)
"""A file that a user has attached, as Open WebUI puts it into the user's message."""

DELIMITED = {
    "Open WebUI": 'Cite with <source id="1">).\n<context>\n<source id="1" name="harbour.md">{}</source>\n</context>\n',
    "AnythingLLM": "Answer.\nContext:\n[CONTEXT 0]:\n{}\n[END CONTEXT 0]\n\n",
    "LibreChat": "<context>\n  <contextItem>\n    <![CDATA[{}]]>\n  </contextItem>\n</context>\n",
}
"""A retrieved passage, as clients with a retrieval of their own put it into a message."""


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = build_tokenizer(lambda: [*PASSAGES, QUESTION, CONTEXT])
    lm = LanguageModel.wrap(build_model("llama", max_position_embeddings=2048), tokenizer)
    engine: FusionEngine = make_engine(lm, MemoryStore(), prefix_bytes=10**8)
    engine.warm(PASSAGES)
    backend = EngineBackend(EngineHandle.wrap(engine), "tiny")
    async with client(make_app(backend)) as http:
        yield http
    backend.close()


def read_stream(response: httpx.Response) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the text of a stream, its usage, and the report."""
    assert response.status_code == 200, response.text
    pieces = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])
    (last,) = [piece for piece in pieces if piece.get("usage")]
    return text, last["usage"], last["fusion"]


async def test_open_webui_sends_a_file_whole_and_then_the_conversation(http: httpx.AsyncClient) -> None:
    """Every passage of the file is reused, and the next turn reuses the turn before it."""
    listed = (await http.get("/v1/models")).json()["data"]
    asked = CONTEXT.format(text="\n\n".join(PASSAGES), question=QUESTION)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]
    body = {"model": listed[0]["id"], "stream": True, "max_tokens": 8, "stream_options": {"include_usage": True}}
    text, usage, report = read_stream(await post(http, "chat/completions", **body, messages=messages))
    assert [lookup["hit"] for lookup in report["lookups"] if lookup["role"] == "chunk"] == [True] * len(PASSAGES)
    reused = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < reused < usage["prompt_tokens"]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And when?"}]
    _, later, _ = read_stream(await post(http, "chat/completions", **body, messages=messages))
    assert later["prompt_tokens_details"]["cached_tokens"] > reused


async def test_a_context_in_the_last_message_is_found_behind_a_history_without_it(http: httpx.AsyncClient) -> None:
    """Open WebUI sends earlier questions as they were typed, and the context of a new one in the last message."""
    messages = [{"role": "user", "content": "Good morning."}, {"role": "assistant", "content": "Good morning."}]
    body = {"model": "tiny", "stream": True, "max_tokens": 8, "stream_options": {"include_usage": True}}
    for turn, passages in enumerate((PASSAGES[:2], PASSAGES[1:])):
        asked = CONTEXT.format(text="\n\n".join(passages), question=QUESTION)
        told = [*messages, {"role": "user", "content": asked}]
        text, usage, report = read_stream(await post(http, "chat/completions", **body, messages=told))
        chunks = [lookup for lookup in report["lookups"] if lookup["role"] == "chunk"]
        assert [lookup["hit"] for lookup in chunks] == [True] * 2
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.7 * sum(lookup["tokens"] for lookup in chunks)
        assert bool(report["prefix_tokens"]) == bool(turn), "what comes before the context is the turn before"
        messages += [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": text}]


@pytest.fixture
async def keeping(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[httpx.AsyncClient, FusionEngine, IdleWarming]]:
    """A server with `--keep` over an empty store."""
    monkeypatch.setattr(idle_warming, "IDLE_S", 0.02)
    lm = LanguageModel.wrap(build_model("llama", max_position_embeddings=2048), build_tokenizer(lambda: [*PASSAGES]))
    engine = make_engine(lm, MemoryStore(), prefix_bytes=0)
    handle = EngineHandle.wrap(engine)
    keep = IdleWarming(handle)
    backend = EngineBackend(handle, "tiny", idle_warming=keep)
    async with client(make_app(backend)) as http:
        yield http, engine, keep
    backend.close()


async def chunk_hits(http: httpx.AsyncClient, content: str) -> list[bool]:
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    lookups = (await post(http, "chat/completions", **body)).json()["fusion"]["lookups"]
    return [lookup["hit"] for lookup in lookups if lookup["role"] == "chunk"]


@pytest.mark.parametrize("delimited", DELIMITED.values(), ids=list(DELIMITED))
async def test_what_a_client_has_retrieved_itself_is_warm_the_next_time(
    delimited: str, keeping: tuple[httpx.AsyncClient, FusionEngine, IdleWarming]
) -> None:
    """The question around the passage is not kept."""
    http, engine, keep = keeping
    for turn in range(2):
        assert await chunk_hits(http, delimited.format(PASSAGES[0]) + QUESTION) == [True] * turn
        await until(lambda: keep.warmed == 1)
    await asyncio.sleep(0.1)
    assert keep.warmed == 1
    assert stored(engine) == {PASSAGES[0]}


async def test_a_file_of_warmed_passages_is_not_kept_as_a_whole(
    keeping: tuple[httpx.AsyncClient, FusionEngine, IdleWarming],
) -> None:
    http, engine, _ = keeping
    engine.warm(PASSAGES[:2])
    before = len([*engine.store.entries()])
    text = "\n".join(PASSAGES[:2]).replace(". ", ".\n")
    assert set(await chunk_hits(http, CONTEXT.format(text=text, question=QUESTION))) == {True}
    await asyncio.sleep(0.2)
    assert len([*engine.store.entries()]) == before


def test_a_passage_begins_at_the_last_delimiter_before_its_end() -> None:
    assert delimited_passages("<source id='1'>" * 3 + "one</source><source id='2'> two </source>") == ["one", "two"]
    assert delimited_passages("<source id='1'></source> </source> [CONTEXT 1]:\n") == []


async def test_documents_are_given_beside_a_history_that_has_some(http: httpx.AsyncClient) -> None:
    asked = CONTEXT.format(text=PASSAGES[0], question="Good morning?")
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Good morning."}]
    messages += [{"role": "user", "content": QUESTION}]
    body = {"model": "tiny", "stream": True, "max_tokens": 8, "stream_options": {"include_usage": True}}
    _, _, report = read_stream(await post(http, "chat/completions", **body, messages=messages, documents=PASSAGES[1:]))
    hits = [lookup["hit"] for lookup in report["lookups"] if lookup["role"] == "chunk"]
    assert hits == [True] * 3, "the one in the history and the two beside it"


async def test_tools_are_never_left_out_in_silence(http: httpx.AsyncClient) -> None:
    """As by `ChatQCFuse` and `QCFuseLLM`: a template that shows none refuses them, unless none may be called."""
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": QUESTION}]}
    plain = (await post(http, "chat/completions", **body)).json()
    for choice in ({"tools": []}, {"tools": [LOOK_UP], "tool_choice": "none"}):
        reply = (await post(http, "chat/completions", **body, **choice)).json()
        assert reply["choices"] == plain["choices"]
        assert reply["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"stream": True}):
        refused = await post(http, "chat/completions", **body, tools=[LOOK_UP], **choice)
        assert refused.status_code == 400, choice
        assert "no place for tools: take a model that was trained to call tools" in error(refused)
