"""A real server with the default model under load: a long prompt holds nobody up, and nobody starves."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SchedulerSettings
from qcfuse_rag.engine.engine_handle import EngineHandle
from qcfuse_rag.engine.request import RequestHandle
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from qcfuse_rag.server.http_server import make_server
from tests.stress.campaign import FULL, Tally, sized

CLIENTS = sized(4, 16)
SECONDS = sized(10, 180)
LONG_WORDS = sized(1500, 8000)
FIRST_TOKEN_S = sized(20, 3)
"""Most seconds to the first token of 19 in 20 short questions; the small campaign may run beside other tests."""
CANCELLED_S = sized(10, 1)
"""Most seconds until a prefill has ended whose client has gone."""
THREADS = sized(1, 2)
ANSWER_TOKENS, CANCEL_AFTER_S = 16, sized(1, 8)
WORDS = ("the", "boat", "is", "at", "sea", "and", "sun", "up", "so", "we", "go", "home", "to", "eat", "then", "bed")
QUESTIONS = ("hi", "Who are you?", "Name a colour.", "What is a boat?", "Say something kind.", "How far is the moon?")


@dataclass
class Load:
    """What clients met."""

    first_token_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    cancelled_s: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def server(smollm2: LanguageModel) -> Iterator[tuple[str, EngineBackend]]:
    """Serve the default model at a socket of this machine; return the address and what answers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    engine = FusionEngine(smollm2, MemoryStore())
    engine.compile()
    backend = EngineBackend(EngineHandle.wrap(engine, SchedulerSettings(waiting=72)), "smollm2", max_requests=72)
    http_server = make_server(make_app(backend), max_requests=72)
    http_server.config.port = 0
    thread = threading.Thread(target=http_server.run)
    thread.start()
    while not http_server.started:
        time.sleep(0.01)
    port = http_server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", backend
    http_server.should_exit = True
    thread.join()
    backend.close()
    torch.set_num_threads(threads)


@asynccontextmanager
async def answer(http: httpx.AsyncClient, text: str) -> AsyncIterator[AsyncIterator[str]]:
    """Ask; yield the pieces of the answer as they come."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": ANSWER_TOKENS}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        yield pieces(response)


async def pieces(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the pieces of a streamed answer; its end has to be marked."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield content_of(json.loads(line.removeprefix("data: ")))
    raise AssertionError("the stream ended midway")


def content_of(event: dict[str, Any]) -> str:
    content: str = event["choices"][0]["delta"].get("content") or ""
    return content


def long_text(seed: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(LONG_WORDS))


async def ask(http: httpx.AsyncClient, text: str) -> tuple[float, float]:
    """Ask; return the seconds to the first piece and to the last."""
    began = time.perf_counter()
    first = None
    async with answer(http, text) as parts:
        async for _ in parts:
            first = first or time.perf_counter() - began
    assert first is not None
    return first, time.perf_counter() - began


def prefilling(backend: EngineBackend, least: int) -> list[RequestHandle]:
    """Return the requests with long prompts that are not prefilled yet."""
    return [request for request in list(backend._handle.scheduler._queue) if len(request.prompt) > least]


async def leave(http: httpx.AsyncClient, backend: EngineBackend, text: str) -> float | None:
    """Ask and go in the middle of the prefill; return the seconds until it has ended, None if it was done before."""
    try:
        async with asyncio.timeout(CANCEL_AFTER_S):
            await ask(http, text)
    except TimeoutError:
        left = time.perf_counter()
        gone = prefilling(backend, LONG_WORDS // 2)
        while not all(request.finished for request in gone):
            await asyncio.sleep(0.01)
        return time.perf_counter() - left if gone else None
    return None


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.enable_socket
async def test_a_short_question_beside_a_long_prompt_is_answered_soon(server: tuple[str, EngineBackend]) -> None:
    address, backend = server
    tally = Tally(f'"hi" beside a prompt of {LONG_WORDS:,} words')
    async with httpx.AsyncClient(base_url=address, timeout=600) as http:
        await ask(http, "hi")
        long = asyncio.create_task(ask(http, long_text(0)))
        times = []
        while not prefilling(backend, LONG_WORDS // 2):
            await asyncio.sleep(0.01)
        for _ in range(sized(1, 5)):
            await asyncio.sleep(sized(1, 5))
            times.append(await ask(http, "hi"))
            assert not long.done(), "the long prompt was not beside it"
        long_first_s, _ = await long
    tally.trials = len(times)
    tally.note("ms to the first token, most", int(1000 * max(first for first, _ in times)))
    tally.note("ms to the end of 16 tokens, most", int(1000 * max(whole for _, whole in times)))
    tally.note("ms to the first token of the long prompt", int(1000 * long_first_s))
    tally.finish()
    assert max(first for first, _ in times) < FIRST_TOKEN_S


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.enable_socket
async def test_many_clients_one_of_them_with_long_prompts(server: tuple[str, EngineBackend]) -> None:
    """Short questions come soon, long prompts are answered too, and those that were left end soon."""
    address, backend = server
    tally, load = Tally(f"{CLIENTS} clients for {SECONDS} s, one with prompts of {LONG_WORDS:,} words"), Load()
    until = time.perf_counter() + SECONDS
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=httpx.Limits(max_connections=None)) as http:

        async def short_client(seed: int) -> None:
            chosen = random.Random(seed)
            await asyncio.sleep(chosen.uniform(0, 3))
            while time.perf_counter() < until:
                first, _ = await ask(http, chosen.choice(QUESTIONS))
                load.first_token_s.append(first)
                await asyncio.sleep(chosen.uniform(1, 5))  # to read the answer

        async def long_client() -> None:
            seed = 0
            while time.perf_counter() < until:
                seed += 2
                if (cancelled_s := await leave(http, backend, long_text(seed))) is not None:
                    load.cancelled_s.append(cancelled_s)
                load.long_s.append((await ask(http, long_text(seed + 1)))[0])

        await asyncio.gather(long_client(), *map(short_client, range(CLIENTS - 1)))
    times = sorted(load.first_token_s)
    p95_s = times[int(0.95 * len(times))]
    tally.trials = len(times) + len(load.long_s) + len(load.cancelled_s)
    tally.note("short questions", len(times))
    tally.note("ms to their first token, median", int(1000 * times[len(times) // 2]))
    tally.note("ms p95", int(1000 * p95_s))
    tally.note("ms at most", int(1000 * times[-1]))
    tally.note("long prompts", len(load.long_s))
    tally.note("ms to their first token at most", int(1000 * max(load.long_s)))
    tally.note("cancelled long prompts", len(load.cancelled_s))
    tally.note("ms until they ended at most", int(1000 * max(load.cancelled_s, default=0)))
    tally.finish()
    assert p95_s < FIRST_TOKEN_S
    assert times[-1] < 4 * FIRST_TOKEN_S, "nobody starves"
    assert load.long_s, "not even the long ones"
    assert max(load.cancelled_s, default=0) < CANCELLED_S
    assert load.cancelled_s or not FULL
