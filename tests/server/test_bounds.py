"""The server's bounds hold for requests made to do harm, beside long prompts, and over conversations that go on."""

from __future__ import annotations

import asyncio
import gc
import json
import random

import pytest

from qcfuse_rag import LanguageModel, MemoryStore, SchedulerSettings
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from qcfuse_rag.server.serve import make_server
from tests.server.test_refusals import BODY, PATH, FixedBackend, listening
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.serving import ask, client, serving

REFUSALS = {400, 404, 405, 413, 415, 421, 431}
INVALID = b"Invalid HTTP request received."


def harmful(rng: random.Random) -> bytes:
    """Return a request with a damaged body, head or both."""
    at = rng.randrange(len(BODY))
    bodies = (BODY, BODY[:at], BODY[:at] + rng.randbytes(9) + BODY[at:], b"\xff\xfe" + BODY, b"[" * 100_000, BODY * 2)
    body = rng.choice(bodies)
    lines = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
    odd = rng.choice(
        ("", f"X-Long: {'x' * 100_000}", "Host: other", "Content-Type: text/html", "Transfer-Encoding: chunked")
    )
    lines[0] = rng.choice((lines[0], lines[0], f"PUT {PATH} HTTP/1.1", "POST /v1/..%2f HTTP/1.1", "POST", "\x16\x03"))
    length = rng.choice((len(body), len(body), -1, "1e3", 10**20))
    head = [*lines, *([odd] if odd else []), f"Content-Length: {length}", "", ""]
    return "\r\n".join(head).encode("latin-1") + body


@pytest.mark.enable_socket
async def test_requests_made_to_do_harm_are_answered_or_refused_and_the_server_stays_well() -> None:
    async with listening(make_server(make_app(FixedBackend()), max_requests=4)) as port:
        for seed in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(harmful(random.Random(seed)))
            writer.write_eof()
            try:
                answer = await asyncio.wait_for(reader.read(), 20)
            except ConnectionError:  # closed while the request was being sent
                answer = b""
            writer.close()
            if not answer:
                continue
            status, (_, _, body) = int(answer.split()[1]), answer.partition(b"\r\n\r\n")
            assert status == 200 or (status in REFUSALS and (body == INVALID or json.loads(body)["error"]["message"]))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_short_question_overtakes_a_long_prompt_which_is_answered_too(llama: LanguageModel) -> None:
    engine = make_engine(llama, MemoryStore())
    backend = EngineBackend(EngineHandle.wrap(engine, SchedulerSettings(rows=1, part_s=1e-6)), "tiny")
    ended: list[str] = []

    async def asked(name: str, text: str) -> None:
        response = await ask(http, documents=None, messages=[{"role": "user", "content": text}], max_tokens=1)
        assert response.status_code == 200, response.text
        ended.append(name)

    async with client(make_app(backend)) as http:
        long = asyncio.create_task(asked("long", "The ferry. " * 100))
        while not backend._handle.scheduler._queue and not long.done():
            await asyncio.sleep(0.001)
        await asyncio.gather(asked("short", "Who?"), long)
    backend.close()
    assert ended == ["short", "long"]


async def test_conversations_that_go_on_and_branch_stay_under_the_bound_and_leak_nothing(llama: LanguageModel) -> None:
    limit = 700 * llama.kv_bytes_per_token
    engine, reused = make_engine(llama, MemoryStore(), prefix_bytes=limit), 0
    async with serving(engine) as http:
        for number in range(6):
            turns = [{"role": "user", "content": f"{number}: {PASSAGES[number % 3]} {QUESTION}"}]
            for _ in range(3):
                answered = await ask(http, documents=None, messages=turns, max_tokens=3)
                reply = answered.json()["choices"][0]["message"]["content"]
                turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
                reused += answered.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert 0 < engine.prefixes.nbytes <= limit
            branch = [*turns[:2], {"role": "user", "content": "Or before?"}]
            assert (await ask(http, documents=None, messages=branch, max_tokens=3)).status_code == 200
        gc.collect()
        held = {id(each) for each in gc.get_objects() if type(each) is KVBuffer}
    assert reused > 0
    assert len(engine.prefixes) < 6 * 4, "some had to go"
    assert held
