"""A remote that is slow or cannot be reached is a miss, and nobody waits long for it."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import redis

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Health, Miss
from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
from qcfuse_rag.store.backends.redis_blobs import RedisBlobs
from qcfuse_rag.store.backends.remote import BlobStore, RemoteStore, open_remote
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.remote.entries import NAME
from tests.store.remote.filesystems import Away, Cloud
from tests.store.remote.servers import RedisProcess


class TestRemoteThatIsAway:
    def test_a_bucket(self, away: type[Away]) -> None:
        store = RemoteStore(FsspecBlobs("away://bucket/kv"), pause_s=0.3)
        store.put(example_key(), example_chunk())
        away.down = True
        self.check_that_it_is_missed(store, "remote away cannot be reached: no route to host")
        away.down = False
        self.check_that_it_comes_back(store)

    def test_it_is_not_asked_again_for_a_while_unless_health_finds_it_back(self, away: type[Away]) -> None:
        store = RemoteStore(FsspecBlobs("away://resting/kv"), pause_s=1000.0)
        away.down = True
        reason = "remote away cannot be reached: no route to host"
        assert store.get(example_key()) == Miss(reason)
        tried, away.down = away.connections, False
        assert {store.get(example_key(number)) for number in range(10)} == {Miss(reason)}
        with pytest.raises(StoreError, match=reason):
            store.put(example_key(), example_chunk())
        assert away.connections == tried
        assert store.health()[0].ok
        assert store.get(example_key()) == Miss("absent")

    def test_a_killed_redis(self, own_server: RedisProcess) -> None:
        store = RemoteStore(RedisBlobs(own_server.url, timeout_s=0.5), pause_s=0.3)
        store.put(example_key(), example_chunk())
        own_server.kill()
        self.check_that_it_is_missed(store, "remote redis cannot be reached: Error 2 connecting to ")
        own_server.start()
        store.health()
        store.put(example_key(), example_chunk())
        self.check_that_it_comes_back(store)

    @pytest.mark.slow
    def test_a_bucket_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = RemoteStore(FsspecBlobs("gs://hanging/kv"), pause_s=60.0)
        store.put(example_key(), example_chunk())
        monkeypatch.setattr("qcfuse_rag.store.backends.remote.ANSWER_S", 1.0)
        monkeypatch.setattr(Cloud, "delay_s", 60.0)
        started = time.monotonic()
        found = [store.get(example_key()) for _ in range(10)]
        assert found == [Miss("remote gs cannot be reached: no whole answer in 1 s")] * 10
        assert time.monotonic() - started < 8.0  # it was asked once, and left alone for the other nine
        monkeypatch.setattr(Cloud, "delay_s", 0.0)
        store._pause_s = store._paused_until = 0.0
        self.check_that_it_comes_back(store)

    def test_a_share_that_hangs_and_whose_client_has_no_time_limit(
        self, away: type[Away], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("qcfuse_rag.store.backends.remote.ANSWER_S", 0.3)
        store = RemoteStore(FsspecBlobs("away://hanging/kv"))
        store._blobs.read = lambda name: time.sleep(20)  # type: ignore[assignment, method-assign]
        started = time.monotonic()
        found = [store.get(example_key()) for _ in range(10)]
        assert found == [Miss("remote away cannot be reached: no whole answer in 0.3 s")] * 10
        assert time.monotonic() - started < 10

    def test_there_are_only_so_many_threads_that_nobody_waits_for(
        self, away: type[Away], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("qcfuse_rag.store.backends.remote.ANSWER_S", 0.05)
        monkeypatch.setattr("qcfuse_rag.store.backends.remote.MOST_THREADS", 3)
        store, answered = RemoteStore(FsspecBlobs("away://many/kv"), pause_s=0.0), threading.Event()
        store.put(example_key(), example_chunk())
        read, before = store._blobs.read, {*threading.enumerate()}
        monkeypatch.setattr(store._blobs, "read", lambda name: answered.wait(60) and read(name))
        late = Miss("remote away cannot be reached: no whole answer in 0.05 s")
        full = Miss("remote away cannot be reached: 3 earlier requests have no answer yet")
        assert [store.get(example_key()) for _ in range(5)] == [late, late, late, full, full]
        waiting = {*threading.enumerate()} - before
        answered.set()
        for thread in waiting:
            thread.join(60)
        assert len(waiting) == 3
        monkeypatch.setattr("qcfuse_rag.store.backends.remote.ANSWER_S", 60.0)
        assert_same(store.get(example_key()), example_chunk())

    def test_what_is_written_too_late_does_not_come_back(
        self, away: type[Away], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It counts as not stored, so nobody would remove it when its document is forgotten."""
        monkeypatch.setattr("qcfuse_rag.store.backends.remote.ANSWER_S", 0.1)
        store, written, undone = RemoteStore(FsspecBlobs("away://late/kv")), threading.Event(), threading.Event()
        write, delete = store._blobs.write, store._blobs.delete

        def late(*arguments: Any) -> None:
            time.sleep(0.5)
            write(*arguments)
            written.set()

        def undo(name: str) -> bool:
            done = delete(name)
            undone.set()
            return done

        monkeypatch.setattr(store._blobs, "write", late)
        monkeypatch.setattr(store._blobs, "delete", undo)
        with pytest.raises(StoreError, match=r"no whole answer in 0\."):
            store.put(example_key(), example_chunk())
        assert written.wait(10)
        assert undone.wait(10)
        assert list(store._blobs.names()) == []

    @pytest.mark.parametrize("url", ["unix:///nonexistent/redis.sock", "away://bucket/kv"])
    def test_one_that_was_never_there(self, away: type[Away], url: str) -> None:
        away.down = True
        with open_remote(url) as store:
            found = store.get(example_key())
            assert isinstance(found, Miss)
            assert re.match("remote (redis|away) cannot be reached: ", found.reason)

    @pytest.mark.slow
    def test_only_one_caller_tries_whether_it_is_back(self, away: type[Away]) -> None:
        store = RemoteStore(FsspecBlobs("away://once/kv"), pause_s=0.05)
        away.down = True
        store.get(example_key())
        time.sleep(0.06)
        tried, waiting = [], threading.Barrier(8)

        def slow(name: str) -> None:
            tried.append(name)
            time.sleep(0.1)
            raise RuntimeError("no route to host")

        store._pause_s = 60.0  # so that none of those who ask comes after the next pause
        store._blobs.read = slow  # type: ignore[method-assign]

        def ask() -> None:
            waiting.wait()
            store.get(example_key())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(tried) == 1

    def check_that_it_is_missed(self, store: RemoteStore, reason: str) -> None:
        found = [store.get(example_key(number)) for number in range(10)]
        assert all(isinstance(result, Miss) for result in found)
        assert [result.reason.startswith(reason) for result in found] == [True] * 10, found
        assert isinstance(store.open(example_key().address), Miss)
        assert example_key() not in store
        assert not store.pin(example_key())
        assert not store.discard(example_key())
        assert not store.discard(example_key(), "damaged")
        for act in (lambda: store.put(example_key(), example_chunk()), lambda: list(store.entries())):
            with pytest.raises(StoreError, match=reason):
                act()
        for act in (store.stats, store.clear):
            with pytest.raises(StoreError, match=reason):
                act()
        [health] = store.health()
        assert not health.ok
        assert reason in health.problems[0]
        assert "check its address" in health.problems[0]

    def check_that_it_comes_back(self, store: RemoteStore) -> None:
        time.sleep(store._pause_s)
        assert_same(store.get(example_key()), example_chunk())
        assert store.health()[0].ok
        assert len(list(store.entries())) == 1


def test_one_bad_blob_does_not_make_the_others_wait(server: RedisProcess) -> None:
    client = redis.Redis(unix_socket_path=server.socket)
    client.lpush(f"poisoned:{NAME}", "a list")
    store = RemoteStore(RedisBlobs(server.url, "poisoned:"))
    store.put(example_key(1), example_chunk(1))
    found = store.get(example_key())
    assert isinstance(found, Miss)
    assert found.reason.startswith("remote redis failed: WRONGTYPE")
    assert_same(store.get(example_key(1)), example_chunk(1))
    assert [entry.address for entry in store.entries()] == [example_key(1).address]
    store.put(example_key(), example_chunk())
    assert_same(store.get(example_key()), example_chunk())


def test_health_leaves_nothing_behind(blobs: BlobStore) -> None:
    assert RemoteStore(blobs).health() == [Health(f"remote {blobs.kind}", ok=True)]
    assert list(blobs.names()) == []


def test_health_tells_of_a_remote_that_forgets(in_memory: FsspecBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "write", lambda *arguments: None)
    [health] = RemoteStore(in_memory).health()
    assert health.problems == ("does not return what was written; is it full, or is there a proxy in between?",)
