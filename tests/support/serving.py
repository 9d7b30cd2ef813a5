"""Ask an endpoint in this process, or run one in another."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from qcfuse_rag import FusionEngine
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from tests.support.engines import METHOD_OPTIONS
from tests.support.passages import PASSAGES, QUESTION

QCFUSE = (sys.executable, "-c", "from qcfuse_rag.cli.app import run; run()")
JSON = {"content-type": "application/json"}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "documents": PASSAGES, "max_tokens": 12}


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def run_server(library: Path, *options: str, **variables: str) -> Iterator[str]:
    """Run `qcfuse serve` over a library with the tests' method, then end it by SIGTERM; yield its address."""
    address = f"http://127.0.0.1:{(port := free_port())}/"
    command = [*QCFUSE, "serve", "--store", str(library), "--device", "cpu", "--port", str(port), *METHOD_OPTIONS]
    with subprocess.Popen([*command, *options], env={**os.environ, **variables}) as server:
        for _ in range(1200):
            assert server.poll() is None
            try:
                urllib.request.urlopen(f"{address}healthz").close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
        server.send_signal(signal.SIGTERM)
        assert server.wait(15) == 0


@asynccontextmanager
async def serving(engine: FusionEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an engine as `tiny`; yield a client. The settings are those of the backend."""
    backend = EngineBackend(EngineHandle.wrap(engine), "tiny", **settings)
    async with client(make_app(backend, library=settings.get("library"))) as http:
        yield http
    backend.close()


def client(app: Starlette, **headers: str) -> httpx.AsyncClient:
    """Return a client of an application."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here", headers=headers)


async def ask(http: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    """Ask about the passages, with other or more fields."""
    return await http.post("/v1/chat/completions", content=json.dumps({**ASKED, **changes}), headers=JSON)


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    """Post a body of JSON to a path behind `/v1/`."""
    return await http.post(f"/v1/{path}", content=json.dumps(body), headers=JSON)


def error(response: httpx.Response) -> str:
    """Return the message of an error in OpenAI's words."""
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    message: str = body["message"]
    return message


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream that came to its end."""
    *lines, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


async def until(true: Callable[[], object]) -> None:
    """Wait until something is true, for some seconds at most."""
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
