"""Behaviour of Redis alone."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.redis_blobs import RedisBlobs
from qcfuse_rag.store.backends.remote import RemoteStore
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.remote.servers import RedisProcess


def test_a_full_redis_is_an_error_of_the_put_alone(own_server: RedisProcess) -> None:
    store = RemoteStore(RedisBlobs(own_server.url))
    store.put(example_key(), example_chunk())
    redis.Redis(unix_socket_path=own_server.socket).config_set("maxmemory", 1)
    with pytest.raises(StoreError, match=r"remote redis failed: .*maxmemory"):
        store.put(example_key(1), example_chunk(1))
    assert_same(store.get(example_key()), example_chunk())
    assert "maxmemory" in store.health()[0].problems[0]


def test_two_prefixes_of_one_server_are_two_stores(server: RedisProcess) -> None:
    first, two = (RemoteStore(RedisBlobs(server.url, prefix)) for prefix in ("one?:", "one!:"))
    first.put(example_key(), example_chunk())
    assert example_key() not in two
    assert list(two.entries()) == []
    assert two.clear() == 0
    assert example_key() in first


def test_many_entries_are_listed_in_steps(on_redis: RedisBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcfuse_rag.store.backends.redis_blobs.SCAN_BATCH", 7)
    for number in range(50):
        on_redis.write(f"{number}.kv", [bytes(number)])
    assert sorted(on_redis.names()) == sorted((f"{number}.kv", number) for number in range(50))


@contextmanager
def answering(folder: Path, answer: bytes, *, first: int, pause_s: float = 0.0, closes: bool = False) -> Iterator[str]:
    """Yield the URL of a server that sends an answer to all commands, after its first bytes one by one."""

    class Answers(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while command := self.rfile.readline():
                for _ in range(int(command[1:])):  # an array of that many texts, each behind its length
                    self.rfile.read(int(self.rfile.readline()[1:]) + 2)
                with suppress(OSError):  # the client has gone
                    self.wfile.write(answer[:first])
                    for byte in answer[first:]:
                        time.sleep(pause_s)
                        self.wfile.write(bytes([byte]))
                if closes:
                    return

    with socketserver.ThreadingUnixStreamServer(str(folder / "socket"), Answers) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"unix://{folder}/socket"
        server.shutdown()


@pytest.mark.parametrize("answer", [b"*1\r\n$1\r\nx\r\n", b":7\r\n", b"+OK\r\n", b"!not RESP\r\n"])
def test_a_server_that_answers_with_anything_else_is_a_miss_with_its_reason(answer: bytes, tmp_path: Path) -> None:
    with answering(tmp_path, answer, first=len(answer)) as url, RemoteStore(RedisBlobs(url)) as store:
        miss = store.open(example_key().address)
        assert isinstance(miss, Miss)
        assert "redis" in miss.reason


@pytest.mark.parametrize(
    ("answer", "first", "closes", "reason"),
    [
        (b"$2000\r\n" + bytes(2002), 0, False, "no whole answer in 0.5 s"),
        (b"", 0, False, "Timeout reading from"),
        (b"$2000\r\n" + bytes(10), 99, True, "Connection closed by server"),
        (b"$99999999999999\r\n" + bytes(10), 99, False, "Timeout reading from"),
        (b"*99999999\r\n" + b"$1\r\nx\r\n" * 400, 0, False, "no whole answer in 0.5 s"),
    ],
    ids=["drips", "says nothing", "closes in the middle", "announces 100 TB", "a long array"],
)
def test_a_server_that_does_not_come_to_an_end_is_a_miss_in_time(
    answer: bytes, first: int, closes: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcfuse_rag.store.backends.remote.ANSWER_S", 0.5)
    started = time.monotonic()
    with (
        answering(tmp_path, answer, first=first, pause_s=0.02, closes=closes) as url,
        RemoteStore(RedisBlobs(url, timeout_s=0.2)) as store,
    ):
        found = [store.open(example_key(number).address) for number in range(5)]
        assert [isinstance(miss, Miss) and reason in miss.reason for miss in found] == [True] * 5, found
        with pytest.raises(StoreError, match=reason):
            store.put(example_key(), example_chunk())
        with pytest.raises(StoreError, match=reason):
            list(store.entries())
        assert not store.health()[0].ok
    assert time.monotonic() - started < 15, "asked once, and then left alone; `health` asks again"


def test_a_late_request_closes_no_connection_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcfuse_rag.store.backends.remote.ANSWER_S", 0.3)
    connected, connect = list[int](), redis.UnixDomainSocketConnection.connect
    monkeypatch.setattr(
        redis.UnixDomainSocketConnection, "connect", lambda connection: connected.append(1) or connect(connection)
    )
    with (
        answering(tmp_path, b"$20\r\n" + bytes(22), first=0, pause_s=0.02) as url,
        RemoteStore(blobs := RedisBlobs(f"{url}?protocol=2"), pause_s=0.0) as store,
        ThreadPoolExecutor(2) as threads,
    ):
        slow = threads.submit(store._within, lambda: blobs.read("slow"), limit_s=60.0)
        found = store.open(example_key().address)
        assert isinstance(found, Miss)
        assert "no whole answer in 0.3 s" in found.reason
        assert slow.result() == bytes(20)
        assert len(connected) == 2, "neither was sent again"
        assert store._within(lambda: blobs.read("next"), limit_s=60.0) == bytes(20)
