"""The HTTP application: OpenAI's protocol, its limits and its refusals."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from qcfuse_rag import FusionEngine, SamplingParams, SchedulerSettings, make_method
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.prompts.builder import CHEAP_TOKENS, PromptTokenizer
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import MAX_PREPARING, EngineBackend
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.events import Event, Failure, Piece
from tests.support.cases import cases
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import ASKED, JSON, ask, client, error, serving
from tests.support.thinking import answer_with
from tests.support.tool_templates import LOOK_UP, tool_model


@pytest.fixture(scope="module")
def engine() -> FusionEngine:
    return make_warmed_engine(tool_model())


@pytest.fixture
def backend(engine: FusionEngine) -> Iterator[EngineBackend]:
    handle = EngineHandle.wrap(engine, SchedulerSettings(waiting=3, active=1))
    backend = EngineBackend(handle, "tiny", most_tokens=600, max_requests=3)
    yield backend
    backend.close()


async def test_documents_are_reused_and_the_answer_is_the_engines(
    http: httpx.AsyncClient, engine: FusionEngine
) -> None:
    body = (await ask(http)).json()
    expected = engine.generate(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=12))
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["finish_reason"] == "length"
    assert body["model"] == "tiny"
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == expected.usage.reused_tokens > 0
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 12
    assert body["fusion"]["fallback"] is None


async def test_an_exact_answer_is_full_prefills_if_the_request_or_the_server_says_so(engine: FusionEngine) -> None:
    params = SamplingParams(max_new_tokens=12)
    expected = engine.generate(engine.prompt(QUESTION, PASSAGES), params, method=make_method("full"))
    for server, request in (("exact", None), ("fast", "exact")):
        async with serving(engine, fidelity=server) as http:
            body = (await ask(http, fidelity=request)).json()
            assert body["choices"][0]["message"]["content"] == expected.text
            assert body["fusion"]["verified_upto"] == len(expected.ids)
            assert (await ask(http, fidelity="fast")).json()["fusion"]["verified_upto"] is None
            assert "fidelity" in error(await ask(http, fidelity="slow"))


@pytest.mark.slow
async def test_tools_and_schemas(http: httpx.AsyncClient) -> None:
    tools = {"tools": [LOOK_UP], "tool_choice": "required", "max_tokens": 200}
    choice = (await ask(http, **tools)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert set(json.loads(call["function"]["arguments"])) == {"boat", "year"}
    since = [*ASKED["messages"], choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "Sunk."}]
    answered = (await ask(http, messages=since, tools=[LOOK_UP])).json()
    assert answered["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    streamed = await ask(http, **tools, stream=True)
    assert '"tool_calls": [{"index": 0' in streamed.text
    schema = {"type": "object", "properties": {"green": {"type": "boolean"}}, "required": ["green"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "hull", "schema": schema}}
    text = (await ask(http, response_format=wanted, max_tokens=60)).json()["choices"][0]["message"]["content"]
    assert json.loads(text)["green"] in (True, False)


async def test_unknown_and_neutral_fields_are_passed_over(http: httpx.AsyncClient) -> None:
    absent = {"stream": None, "stream_options": None, "model": None, "tools": None}
    neutral = {**absent, "n": 1, "frequency_penalty": 0.0, "user": "me", "parallel_tool_calls": True, "logit_bias": {}}
    neutral |= {"repetition_penalty": 1.0, "modalities": ["text"], "guided_json": None, "chat_template_kwargs": {}}
    neutral |= {"reasoning_effort": "medium"}
    neutral |= {"min_tokens": 0, "echo": False, "function_call": "auto", "truncate_prompt_tokens": -1}
    neutral |= {"priority": [[["any", {"depth": 1}]]], "prediction": {"type": "content", "content": "No."}}
    assert (await ask(http, **neutral)).json()["choices"] == (await ask(http)).json()["choices"]
    assert (await ask(http, temperature=1e-45)).status_code == 200


async def test_a_token_is_asked_for_everywhere_but_at_the_health_check(backend: EngineBackend) -> None:
    app = make_app(backend, token="right", metrics=lambda: b"qcfuse_prefills_total 1\n")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}):
        async with client(app, **headers) as http:
            for path in ("/v1/models", "/v1/documents", "/v1/embeddings", "/metrics", "/openapi.json", "/nowhere"):
                assert (await http.get(path)).status_code == 401
            refused = await ask(http)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert (await http.get("/healthz")).json() == {"status": "ok"}
    async with client(app, authorization="Bearer right") as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await http.get("/metrics")).text == "qcfuse_prefills_total 1\n"
        assert (await ask(http)).status_code == 200


async def test_penalties_and_biases_change_answers(http: httpx.AsyncClient, engine: FusionEngine) -> None:
    async def text(**settings: Any) -> str:
        response = await ask(http, max_tokens=8, **settings)
        return str(response.json()["choices"][0]["message"]["content"])

    vocabulary = engine.lm.model.get_input_embeddings().num_embeddings
    only = next(token for token in range(300, vocabulary) if engine.lm.tokenizer.decode([token]).isalpha())
    assert await text(logit_bias={str(only): 100}) == engine.lm.tokenizer.decode([only] * 8)
    varied = await text(logit_bias={str(only): 100}, presence_penalty=2, frequency_penalty=2, repetition_penalty=90)
    assert varied != engine.lm.tokenizer.decode([only] * 8)
    assert await text(top_k=1, temperature=1, seed=1) == await text()


async def test_one_call_alone_if_that_is_asked_for(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that may call tools as it likes may call several."""
    calls = (json.dumps({"name": "look_up", "arguments": {"boat": boat}}) for boat in ("tug", "ferry"))
    answer_with(monkeypatch, "".join(f"<tool_call>{call}</tool_call>" for call in calls))
    for parallel, count in ((None, 2), (True, 2), (False, 1)):
        choice = (await ask(http, tools=[LOOK_UP], parallel_tool_calls=parallel, max_tokens=200)).json()["choices"][0]
        assert len(choice["message"]["tool_calls"]) == count


async def test_a_host_header_does_not_pass_for_the_health_check(backend: EngineBackend) -> None:
    async with client(make_app(backend, token="right"), host="x/healthz?") as http:
        assert (await ask(http)).status_code == 401


async def test_what_is_not_there_is_an_error_in_openais_words(http: httpx.AsyncClient) -> None:
    assert "the API is at /v1" in error(await http.get("/nowhere"))
    assert error(await http.get("/v1/chat/completions")) == "Method Not Allowed"
    assert "JSON" in error(await http.post("/v1/chat/completions", content=b"{", headers=JSON))


@pytest.mark.slow
async def test_a_request_that_says_no_length_gets_what_fits(http: httpx.AsyncClient, engine: FusionEngine) -> None:
    near = "x " * (engine.lm.context_window.tokens // 2 - 100)
    asked = {"messages": [{"role": "user", "content": near}], "documents": None}
    body = (await ask(http, **asked, max_tokens=None)).json()
    assert body["usage"]["total_tokens"] <= engine.lm.context_window.tokens
    assert body["usage"]["completion_tokens"] > 0


@pytest.mark.enable_socket
@pytest.mark.parametrize("stream", cases([False, True], True))
async def test_a_client_who_goes_ends_the_request(backend: EngineBackend, stream: bool) -> None:
    """Under a real server: only that knows that a socket was closed."""
    server = uvicorn.Server(uvicorn.Config(make_app(backend), port=0, log_level="error"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({**ASKED, "max_tokens": 600, "stream": stream}).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    scheduler = backend._handle.scheduler
    while scheduler.active == 0:
        await asyncio.sleep(0.001)
    (answer,) = [request.handle for request in scheduler._active]
    writer.close()
    while not answer.is_finished:
        await asyncio.sleep(0.01)
    assert answer.generation is not None
    assert answer.generation.finish_reason == "cancelled"
    server.should_exit = True
    await running


async def test_a_request_to_a_closed_engine_is_refused(engine: FusionEngine) -> None:
    handle = EngineHandle.wrap(engine)
    handle.scheduler.close()
    backend = EngineBackend(handle, "tiny")
    async with client(make_app(backend)) as http:
        response = await ask(http, max_tokens=1)
    backend.close()
    assert (response.status_code, "load another one" in response.text) == (503, True)


async def test_a_burst_waits_for_its_turn_to_be_prepared(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may wait do; only so many at a time take the memory that tokenising does."""
    at_once, most, plan = 0, 0, engine.prompt
    lock = threading.Lock()

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.002)
        with lock:
            at_once -= 1
        return plan(*args, **options)

    monkeypatch.setattr(engine, "prompt", counting)
    count = 5 * MAX_PREPARING
    handle = EngineHandle.wrap(engine, SchedulerSettings(waiting=count))
    backend = EngineBackend(handle, "tiny", max_requests=count)
    async with client(make_app(backend)) as http:
        responses = await asyncio.gather(*(ask(http, max_tokens=1) for _ in range(count + 3)))
    backend.close()
    assert Counter(response.status_code for response in responses) == {200: count, 429: 3}
    assert 1 < most <= MAX_PREPARING


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        {"messages": [{"role": "user", "content": "ferry " * 180_000}]},
        {"documents": ["ferry " * 4_000] * 40},
        {"tools": [{"function": {"name": "f", "description": "ferry " * 180_000}}]},
        {"messages": [{"role": "user", "content": "x", "more": ["deep"] * 120_000}]},
        {"messages": [{"role": "user", "content": "Ann sings. " * 250}]},
    ],
    ids=["words", "documents", "tools", "other fields", "what fits"],
)
async def test_a_burst_of_long_texts_leaves_health_and_memory(engine: FusionEngine, content: dict[str, Any]) -> None:
    backend = EngineBackend(EngineHandle.wrap(engine, SchedulerSettings(waiting=64)), "tiny", max_requests=64)
    body = json.dumps({**ASKED, "documents": None, "max_tokens": 1, **content})
    gc.collect()
    before, checks = resident_bytes(), 0
    async with client(make_app(backend)) as http:

        async def post() -> int:
            return (await http.post("/v1/chat/completions", content=body, headers=JSON)).status_code

        asked = [asyncio.create_task(post()) for _ in range(24)]
        while not all(task.done() for task in asked):
            assert (await http.get("/healthz")).status_code == 200
            checks += not all(task.done() for task in asked)
            await asyncio.sleep(0.01)
        statuses = {task.result() for task in asked}
        assert checks, "health is answered before they are"
    backend.close()
    gc.collect()
    assert statuses <= ({200, 400, 429} if len(body) > 10_000 else {200})
    assert resident_bytes() - before < 300e6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect how many tokens are made of each text."""
    counts: list[int] = []
    encoding = PromptTokenizer._encoding

    def counting(self: PromptTokenizer, core: Any, text: str, **options: Any) -> Any:
        found = encoding(self, core, text, **options)
        counts.append(len(found))
        return found

    monkeypatch.setattr(PromptTokenizer, "_encoding", counting)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["\u6f22", "ab ", "a.", "\U0001f680", "  x"])
async def test_tokenising_ends_soon_beyond_the_window(http: httpx.AsyncClient, encoded: list[int], sign: str) -> None:
    """Whatever the characters for each token: in one text, in many, in passages, in earlier messages."""
    text, user = sign * 100_000, {"role": "user", "content": "x"}
    some = [{"role": "user", "content": sign * 1_000}, {"role": "assistant", "content": "x"}] * 100
    for changes in (
        {"messages": [{"role": "user", "content": text}], "documents": None},
        {"messages": [{"role": "user", "content": text}]},
        {"messages": [*some, user], "documents": None},
        {"messages": [*some, user]},
        {"documents": [sign * 1_000] * 100},
    ):
        encoded.clear()
        response = await ask(http, **changes)
        assert response.status_code == 400
        assert "context window" in error(response)
        assert sum(encoded) < 1.1 * CHEAP_TOKENS


async def test_who_goes_before_being_queued_is_not_answered(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, plan, prepared = threading.Event(), engine.prompt, []

    def slow(question: str, *args: Any, **options: Any) -> Any:
        prepared.append(question)
        go_on.wait(20)
        return plan(question, *args, **options)

    handle, queued = EngineHandle.wrap(engine), []
    monkeypatch.setattr(engine, "prompt", slow)
    submit = handle.submit

    def submitted(*request: Any, **options: Any) -> Any:
        queued.append(submit(*request, **options))
        return queued[-1]

    monkeypatch.setattr(handle, "submit", submitted)
    backend = EngineBackend(handle, "tiny", max_requests=MAX_PREPARING + 1)

    async def outcome(tokens: int = 1) -> str | None:
        return [event async for event in backend.answer(ChatRequest(**{**ASKED, "max_tokens": tokens}))][
            -1
        ].finish_reason

    begun = [asyncio.create_task(outcome(300 if number == 0 else 1)) for number in range(MAX_PREPARING)]
    while len(prepared) < MAX_PREPARING:
        await asyncio.sleep(0.001)
    late = asyncio.create_task(outcome())
    await asyncio.sleep(0.01)
    for task in (late, begun[0]):
        task.cancel()
    await asyncio.wait({late, begun[0]})
    assert late.cancelled()
    assert begun[0].cancelled()
    go_on.set()
    assert await asyncio.gather(*begun[1:]) == ["length"] * (MAX_PREPARING - 1)
    assert await outcome() == "length", "both have left their places to others"
    backend.close()
    assert len(prepared) == MAX_PREPARING + 1, "the late one was not even prepared"
    (gone,) = [answer for answer in queued if answer.params.max_new_tokens == 300]
    assert gone.generation is None or gone.generation.finish_reason == "cancelled"


async def test_who_comes_when_the_line_is_full_is_told_when_to_come_again(
    backend: EngineBackend, engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, prefill = threading.Event(), threading.Event(), engine.prefill_in_parts

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return (yield from prefill(*args, **options))

    monkeypatch.setattr(engine, "prefill_in_parts", slow)
    async with client(make_app(backend)) as http:
        asked = [asyncio.create_task(ask(http))]
        assert await asyncio.to_thread(begun.wait, 20)
        asked += [asyncio.create_task(ask(http)) for _ in range(7)]
        while sum(task.done() for task in asked) < 5:  # one is being answered and two wait
            await asyncio.sleep(0.01)
        go_on.set()
        responses = await asyncio.gather(*asked)
    refused = [response for response in responses if response.status_code == 429]
    assert len(refused) == 5
    assert {response.headers["retry-after"] for response in refused} == {"1"}
    assert {error(response) for response in refused} == {"3 requests are answered or waiting already; ask again later"}
    assert [response.status_code for response in responses if response not in refused] == [200] * 3


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (
            RuntimeError("out of memory, and more than a client should know"),
            "server_error",
            "the server failed: RuntimeError",
        ),
        (Failure(502, "the replica was lost"), "bad_gateway", "the replica was lost"),
    ],
)
async def test_what_fails_midway_is_an_event_and_no_end(failure: Exception | Failure, code: str, message: str) -> None:
    class Failing:
        name = "tiny"

        def ready(self) -> str | None:
            return "no replica"

        async def answer(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
            yield Piece("The ")
            if isinstance(failure, Exception):
                raise failure
            yield failure

    async with client(make_app(Failing())) as http:
        text = (await ask(http, stream=True)).text
        assert "[DONE]" not in text
        last = json.loads(text.splitlines()[-2].removeprefix("data: "))["error"]
        assert (last["code"], last["message"]) == (code, message)
        if code == "bad_gateway":
            assert (await ask(http)).status_code == 502
        health = await http.get("/healthz")
        assert (health.status_code, health.json()) == (503, {"status": "no replica"})
