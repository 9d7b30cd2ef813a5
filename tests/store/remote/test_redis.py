"""Behaviour of Redis alone."""

from __future__ import annotations

import socketserver
import threading
from pathlib import Path

import pytest
import redis

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.redis_blobs import RedisBlobs
from qcfuse_rag.store.backends.remote import RemoteStore
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.remote.servers import RedisProcess
from tests.support import seams


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
    seams.redis_scan_batch(monkeypatch, 7)
    for number in range(50):
        on_redis.write(f"{number}.kv", [bytes(number)])
    assert sorted(on_redis.names()) == sorted((f"{number}.kv", number) for number in range(50))


@pytest.mark.parametrize("answer", [b"*1\r\n$1\r\nx\r\n", b":7\r\n", b"+OK\r\n", b"!not RESP\r\n"])
def test_a_server_that_answers_with_anything_else_is_a_miss_with_its_reason(answer: bytes, tmp_path: Path) -> None:
    class Answers(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while command := self.rfile.readline():
                for _ in range(int(command[1:])):  # an array of that many texts, each behind its length
                    self.rfile.read(int(self.rfile.readline()[1:]) + 2)
                self.wfile.write(answer)

    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "socket"), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = RemoteStore(RedisBlobs(f"unix://{tmp_path}/socket"))
        miss = store.open(example_key())
        assert isinstance(miss, Miss)
        assert "redis" in miss.reason
        store.close()
        server.shutdown()
