"""Ten thousand requests made to do harm, over real sockets: each is answered or refused, and the server stays well.

A process of its own asks for `/healthz` all the while, and reads the server's memory.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from qcfuse_rag import LanguageModel, MemoryStore
from qcfuse_rag.engine.engine_handle import EngineHandle
from qcfuse_rag.engine.scheduler import SchedulerSettings
from qcfuse_rag.server.app import make_app
from qcfuse_rag.server.backend import EngineBackend
from qcfuse_rag.server.http_server import make_server
from tests.stress.campaign import Tally, sized
from tests.stress.processes import fork, kill
from tests.stress.requests import HEAVY_BODIES, request, whole_request
from tests.stress.shared import Counters
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES

CLIENTS, WAITING = 12, 64
MOST_TOKENS = 8
MOST_BYTES = 300_000_000
MOST_WAIT_S = sized(1000, 250) / 1000
"""Of a health check; the small campaign may run beside other tests."""
PIECE_BYTES = 1 << 20
ANSWER_TIMEOUT_S = 60.0
REFUSALS = {400, 401, 404, 405, 413, 415, 429, 431}
GONE = "closed without an answer"


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.timeout(1800)
def test_requests_made_to_do_harm(llama: LanguageModel) -> None:
    tally, trials = Tally("requests made to do harm"), sized(300, 10_000)
    with watched_server(llama, tally) as port:
        attack(tally, port, [lambda number=number: request(random.Random(number)) for number in range(trials)])
    tally.finish()


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("body", HEAVY_BODIES.values(), ids=HEAVY_BODIES)
def test_bodies_that_take_long_to_parse(llama: LanguageModel, body: Callable[[], bytes]) -> None:
    """Each is as large as bodies may be, and several come at once."""
    tally = Tally("bodies that take long to parse")
    text = whole_request(body())
    with watched_server(llama, tally) as port:
        attack(tally, port, [lambda: text] * sized(4, 48))
    tally.finish()


@pytest.mark.slow
@pytest.mark.enable_socket
@pytest.mark.timeout(1800)
def test_the_largest_bodies_at_once(llama: LanguageModel) -> None:
    """They come in pieces, so that as many as there may be connections are incomplete at the same time."""
    tally, text = Tally("the largest bodies at once"), whole_request(HEAVY_BODIES["text"]())
    with watched_server(llama, tally) as port:
        connections = [socket.create_connection(("127.0.0.1", port), ANSWER_TIMEOUT_S) for _ in range(sized(60, 500))]
        for at in range(0, len(text), PIECE_BYTES):
            for connection in connections:
                with suppress(OSError):  # refused, and closed
                    connection.sendall(text[at : at + PIECE_BYTES])
        for connection in connections:
            with closing(connection), suppress(ConnectionError):
                tally.trials += 1
                status = connection.makefile("rb").readline().split(b" ")[1:2]
                tally.note(status[0].decode() if status else GONE)
    assert tally.notes.get("429"), tally.notes
    tally.finish()


@contextmanager
def watched_server(lm: LanguageModel, tally: Tally) -> Iterator[int]:
    """Serve in a process of its own; yield the port. Note what health checks and memory were meanwhile."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port: int = listening.getsockname()[1]
    server = fork(lambda: serve(lm, listening))
    listening.close()
    wait_until_healthy(port)
    before, seen = resident_bytes(server), Counters(("asked", "failed", "longest_us", "most_bytes"))
    try:
        poller = fork(lambda: poll(port, server, seen))
        try:
            yield port
        finally:
            kill(poller)
        for _ in range(100):  # memory is given back once the last answers are made
            if resident_bytes(server) - before < MOST_BYTES / 2:
                break
            time.sleep(0.1)
        more_bytes, at_the_end = seen.total("most_bytes") - before, resident_bytes(server) - before
        wait_until_healthy(port)
    finally:
        kill(server)
    longest_s = seen.total("longest_us") / 1e6
    tally.note("most bytes more in the server", max(0, more_bytes))
    tally.note("bytes more at the end", max(0, at_the_end))
    tally.note("health checks", seen.total("asked"))
    tally.note("longest of them in ms", round(1000 * longest_s))
    if more_bytes > MOST_BYTES:
        tally.errors.append(f"the server took {more_bytes:,} bytes more")
    if seen.total("failed"):
        tally.errors.append(f"{seen.total('failed')} health checks failed")
    assert seen.total("asked"), "nothing was watched"
    if longest_s > MOST_WAIT_S:
        tally.errors.append(f"a health check took {longest_s:.3f} s")


def before_other_programs() -> None:
    """Run this process before those of other programs, where that is allowed: the server is measured, not they."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


def serve(lm: LanguageModel, listening: socket.socket) -> None:
    before_other_programs()
    engine = make_engine(lm, MemoryStore())
    engine.warm(PASSAGES)
    handle = EngineHandle.wrap(engine, SchedulerSettings(waiting=WAITING))
    backend = EngineBackend(handle, "tiny", most_tokens=MOST_TOKENS, max_requests=WAITING)
    make_server(make_app(backend), max_requests=WAITING).run(sockets=[listening])


def attack(tally: Tally, port: int, requests: Sequence[Callable[[], bytes]]) -> None:
    """Send requests from several threads."""
    lock, numbers = threading.Lock(), iter(range(len(requests)))

    def run() -> None:
        while (number := next_number()) is not None:
            text = requests[number]()
            try:
                outcome = send(port, text)
            except TimeoutError:
                outcome = f"no answer in {ANSWER_TIMEOUT_S:g} s"
            with lock:
                tally.trials += 1
                tally.note(outcome if outcome in (GONE, "200") or outcome.isdigit() else "unexpected")
                if outcome not in (GONE, "200", *map(str, REFUSALS)):
                    tally.errors.append(f"request {number}: {outcome}")

    def next_number() -> int | None:
        with lock:
            return next(numbers, None)

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send(port: int, text: bytes) -> str:
    """Send a request; return the status of the answer, or what is wrong with it.

    Only a connection that the server closed while the request was being sent may have no answer.
    """
    with closing(socket.create_connection(("127.0.0.1", port), timeout=ANSWER_TIMEOUT_S)) as connection:
        complete = True
        try:
            connection.sendall(text)
        except (BrokenPipeError, ConnectionResetError):
            complete = False
        response = http.client.HTTPResponse(connection, method=text.partition(b" ")[0].decode("latin-1"))
        try:
            response.begin()
            data = response.read()
        except (ConnectionError, http.client.HTTPException) as error:
            return GONE if not complete or isinstance(error, ConnectionError) else f"no answer: {error!r}"
    return str(response.status) if is_sound(response, data) else f"{response.status}: {data[:200]!r}"


def is_sound(response: http.client.HTTPResponse, data: bytes) -> bool:
    """Return whether an answer is one, or a refusal in OpenAI's words or the HTTP parser's."""
    if response.status == 200 or response._method == "HEAD":  # type: ignore[attr-defined]
        return True
    if data == b"Invalid HTTP request received.":
        return True
    try:
        return bool(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


def poll(port: int, server: int, seen: Counters) -> None:
    """Ask for the server's health without end; record how often, the longest time it took, and the most memory."""
    before_other_programs()
    while True:
        started = time.perf_counter()
        ok = is_healthy(port)
        took_us = round(1e6 * (time.perf_counter() - started))
        seen.add(0, "asked")
        seen.add(0, "failed", not ok)
        seen.add(0, "longest_us", max(0, took_us - seen.total("longest_us")))
        seen.add(0, "most_bytes", max(0, resident_bytes(server) - seen.total("most_bytes")))
        time.sleep(0.01)


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def wait_until_healthy(port: int) -> None:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while not is_healthy(port):
        assert time.monotonic() < deadline, "the server is not well"
        time.sleep(0.05)


def resident_bytes(process: int) -> int:
    pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()
