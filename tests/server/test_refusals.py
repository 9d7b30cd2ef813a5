"""Requests that the server refuses by their headers or body, and slow clients that it drops."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.server import answers, auth_middleware, event_response
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.protocol.chat_request import ChatRequest
from qcfuse_rag.server.protocol.events import Event, LastPiece, Piece, Queued
from qcfuse_rag.server.serve import SPARE_CONNECTIONS, make_server
from qcfuse_rag.server.settings import LOOPBACK, ServerSettings
from tests.support.serving import ASKED, JSON, ask, client, error

PATH = "/v1/chat/completions"
BODY = json.dumps(ASKED).encode()
PROTOCOLS = pytest.mark.parametrize("protocol", [H11Protocol, AutoHTTPProtocol], ids=["h11", "auto"])


class FixedBackend:
    """Answers every request with `Yes.`"""

    name = "tiny"

    def ready(self) -> str | None:
        return None

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
        yield Piece("Yes.")
        yield LastPiece(usage={}, report={})


@asynccontextmanager
async def listening(server: uvicorn.Server) -> AsyncIterator[int]:
    """Run a server; yield its port."""
    server.config.port = 0
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    yield port
    server.should_exit = True
    await running
    gc.freeze()  # as it was before: see the tests' `pytest_collection`


async def test_named_web_pages_may_ask_from_a_browser_and_no_others() -> None:
    page, other = "http://localhost:3000", "http://localhost:3001"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    app = make_app(FixedBackend(), token="right", origins=[page])
    async with client(app) as http:
        for origin, status, allowed in ((page, 200, page), (other, 400, None)):
            asked = await http.options(PATH, headers={"origin": origin, **asks})
            assert (asked.status_code, asked.headers.get("access-control-allow-origin")) == (status, allowed)
            refused = await http.post(PATH, content=BODY, headers={**JSON, "origin": origin})
            assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (401, allowed)
    async with client(make_app(FixedBackend())) as http:
        asked = await http.options(PATH, headers={"origin": page, **asks})
        assert (asked.status_code, asked.headers.get("access-control-allow-origin")) == (405, None), "off by default"


@pytest.mark.parametrize("origin", ["*", "localhost:3000", "https://*.example.org", "https://example.org/path"])
def test_web_pages_are_named_whole(origin: str) -> None:
    with pytest.raises(QCFuseError, match="--origins names web pages"):
        ServerSettings(origins=origin).check()
    ServerSettings(origins="http://localhost:3000, https://example.org").check()


def test_only_this_machine_is_let_in_without_a_token() -> None:
    with pytest.raises(QCFuseError, match="open to other machines: set QCFUSE_TOKEN"):
        ServerSettings(host="0.0.0.0").check()
    for settings in (ServerSettings(host="0.0.0.0", token="right"), ServerSettings(host="::1")):
        settings.check()


class SlowBackend(FixedBackend):
    """Answers when it is told to, after it has taken the request, or not even that."""

    def __init__(self, *, queued: bool) -> None:
        self.queued, self.go_on, self.closed = queued, asyncio.Event(), asyncio.Event()

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
        try:
            if self.queued:
                yield Queued("fp_1")
            await self.go_on.wait()
            yield Piece("Yes.")
            yield LastPiece(usage={}, report={})
        finally:
            self.closed.set()


@pytest.mark.enable_socket
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("queued", [True, False])
async def test_a_stream_sends_headers_at_once_and_comments_while_it_waits(
    path: str, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_response, "COMMENT_S", 0.05)
    monkeypatch.setattr(answers, "HEADERS_S", 0.3)
    backend = SlowBackend(queued=queued)
    body = json.dumps({"stream": True, **({"prompt": "x"} if path == "completions" else ASKED)}).encode()
    async with listening(make_server(make_app(backend), max_requests=4)) as port:
        url = f"http://127.0.0.1:{port}/v1/{path}"
        async with httpx.AsyncClient() as http, http.stream("POST", url, content=body, headers=JSON) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert (response.headers["x-accel-buffering"], response.headers["cache-control"]) == ("no", "no-cache")
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
            backend.go_on.set()
            *events, last = [line async for line in lines if line and not line.startswith(":")]
            assert last == "data: [DONE]"
            assert {json.loads(event[6:])["system_fingerprint"] for event in events} == {"fp_1" if queued else None}
        backend.go_on.clear()
        backend.closed.clear()
        async with httpx.AsyncClient() as http, http.stream("POST", url, content=body, headers=JSON):
            pass  # a client who leaves while it waits
        await asyncio.wait_for(backend.closed.wait(), 20)


async def said(port: int, *parts: bytes) -> bytes:
    """Send a request's parts and return the first line of what is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return (await asyncio.wait_for(reader.readline(), 20)).strip()
    except ConnectionError:
        return b"closed"
    finally:
        writer.close()


def head(*more: str, host: str = "localhost") -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_bodies_are_bounded_by_what_they_say_and_by_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_middleware, "MAX_BODY_BYTES", 1000)
    async with client(make_app(FixedBackend())) as http:
        response = await ask(http, documents=["x" * 2000])
        assert (response.status_code, "reads at most 1000" in error(response)) == (413, True)
        pulled = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal pulled
            while True:
                pulled += 1
                yield b" " * 100

        response = await http.post(PATH, content=endless(), headers=JSON)
        assert (response.status_code, "reads at most 1000" in error(response)) == (413, True)
        assert pulled <= 12


async def test_a_body_in_pieces_is_read_to_its_end() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(BODY), 7):
            yield BODY[at : at + 7]

    async with client(make_app(FixedBackend())) as http:
        response = await http.post(PATH, content=pieces(), headers=JSON)
        assert response.json()["choices"][0]["message"]["content"] == "Yes."


@pytest.mark.parametrize(("first", "second"), [(b"Bearer right", b"Bearer wrong"), (b"", b"Bearer right")])
async def test_two_authorizations_are_refused(first: bytes, second: bytes) -> None:
    """A proxy may check the one and this server the other."""
    app = make_app(FixedBackend(), token="right")
    for path in (PATH, "/v1/models", "/healthz"):
        headers = [
            (b"authorization", first),
            (b"Authorization", second),
            *((k.encode(), v.encode()) for k, v in JSON.items()),
        ]
        async with client(app) as http:
            response = await http.request("POST" if path == PATH else "GET", path, content=BODY, headers=headers)
        assert (response.status_code, response.headers["connection"]) == (400, "close")
        assert "authorization is given more than once" in error(response)


@pytest.mark.parametrize("name", ["host", "content-type"])
async def test_other_headers_that_decide_are_given_once(name: str) -> None:
    async with client(make_app(FixedBackend())) as http:
        headers = [*JSON.items(), (name, "localhost"), (name, "page.example")]
        response = await http.post(PATH, content=BODY, headers=headers)
    assert (response.status_code, f"{name} is given more than once" in error(response)) == (400, True)


@pytest.mark.enable_socket
async def test_a_length_does_not_hide_a_larger_body_from_a_real_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_middleware, "MAX_BODY_BYTES", 1000)
    server = make_server(make_app(FixedBackend()), max_requests=1, protocol=H11Protocol)
    chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
    async with listening(server) as port:
        both = head("Content-Length: 10", "Transfer-Encoding: chunked")
        assert await said(port, both, chunk) == b"HTTP/1.1 400 Bad Request"
        assert (await said(port, head("Transfer-Encoding: chunked"), chunk)).startswith(b"HTTP/1.1 413")
        assert await said(port, head(f"Content-Length: {len(BODY)}"), BODY) == b"HTTP/1.1 200 OK"


@pytest.mark.enable_socket
@PROTOCOLS
async def test_a_body_that_does_not_come_is_not_waited_for(
    protocol: type[asyncio.Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth_middleware, "MAX_BODY_S", 0.1)
    server = make_server(make_app(FixedBackend()), max_requests=1, protocol=protocol)
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("Content-Length: 500") + BODY[:9])
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout")
        assert b"the body did not arrive within 0.1 s" in answer
        writer.close()


@pytest.mark.enable_socket
@PROTOCOLS
async def test_headers_that_do_not_come_are_not_waited_for(protocol: type[asyncio.Protocol]) -> None:
    """A request that never begins, a first request, and the next request on the same connection."""
    server = make_server(make_app(FixedBackend()), max_requests=1, headers_s=0.1, protocol=protocol)
    whole = head(f"Content-Length: {len(BODY)}") + BODY
    async with listening(server) as port:
        for before, begun in ((b"", b""), (b"", whole[:30]), (whole, whole[:30])):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(before)
            if before:
                assert (await reader.readline()).strip() == b"HTTP/1.1 200 OK"
                assert (await reader.readuntil(b"}}")).endswith(b"}}")
            for byte in begun:
                writer.write(bytes([byte]))
            assert await asyncio.wait_for(reader.read(), 4) in (b"", b"}")  # uvicorn waits for five seconds
            writer.close()


@pytest.mark.enable_socket
async def test_a_request_that_takes_longer_than_its_headers_is_answered() -> None:
    class Slow(FixedBackend):
        async def answer(self, request: ChatRequest) -> AsyncGenerator[Event, None]:
            await asyncio.sleep(0.15)
            async for event in super().answer(request):
                yield event

    async with listening(make_server(make_app(Slow()), max_requests=1, headers_s=0.05)) as port:
        assert await said(port, head(f"Content-Length: {len(BODY)}"), BODY) == b"HTTP/1.1 200 OK"


@pytest.mark.enable_socket
async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcfuse_rag.server.serve.SPARE_CONNECTIONS", 2)
    async with listening(make_server(make_app(FixedBackend()), max_requests=2)) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert (await said(port, head("Content-Length: 0"))).startswith(b"HTTP/1.1 503")
        for _, writer in held:
            writer.close()
    assert SPARE_CONNECTIONS >= 64


class TestNames:
    """A web page can point its own host name at this machine; its requests then carry that name."""

    @pytest.fixture
    def app(self) -> Starlette:
        return make_app(FixedBackend(), hosts=(*LOOPBACK, "127.0.0.2"))

    @pytest.mark.parametrize("name", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "127.0.0.2"])
    async def test_who_asks_by_a_name_of_this_machine_is_let_in(self, app: Starlette, name: str) -> None:
        async with client(app, host=name) as http:
            assert (await ask(http)).status_code == 200

    @pytest.mark.parametrize(
        "name", ["page.example:8000", "localhost.page.example", "127.0.0.1.page.example", "[::1", "", "10.0.0.1"]
    )
    async def test_who_asks_by_another_name_is_told_of_the_token(self, app: Starlette, name: str) -> None:
        async with client(app, host=name) as http:
            for response in (await ask(http), await http.get("/v1/models"), await http.get("/openapi.json")):
                assert response.status_code == 421
                assert "answers only as localhost, 127.0.0.1, ::1, 127.0.0.2; set QCFUSE_TOKEN" in error(response)
            assert (await http.get("/healthz")).status_code == 200

    async def test_who_has_the_token_may_use_any_name(self) -> None:
        app = make_app(FixedBackend(), token="right", hosts=LOOPBACK)
        async with client(app, host="page.example", authorization="Bearer right") as http:
            assert (await ask(http)).status_code == 200


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
