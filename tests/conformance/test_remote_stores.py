"""Stores on other machines do what the contract says, and what is away, slow, torn or planted is a miss."""

from __future__ import annotations

import asyncio
import errno
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
from fsspec import register_implementation
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from qcfuse_rag import CorruptEntry, KVStore, MemoryStore, Miss, StoreError, TieredStore
from qcfuse_rag.store.blobs import Blobs
from qcfuse_rag.store.bucket import Bucket
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.format import PREAMBLE, encode
from qcfuse_rag.store.key import tenant_prefix
from qcfuse_rag.store.redis import RedisServer
from qcfuse_rag.store.remote import RemoteStore, open_remote
from qcfuse_rag.store.seal import Seal
from qcfuse_rag.store.tenant import TenantStore
from qcfuse_rag.store.testing import KVStoreTests, assert_same, example_chunk, example_key

SECRET = bytes(range(32))
ENTRY = b"".join(encode(example_key(), example_chunk()))
NAME = f"{example_key().address}.kv"


class RedisProcess:
    """A server of the tests' own, on a Unix socket and no port."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._folder = tempfile.mkdtemp(prefix="qcfuse-")  # pytest's own are too long for a socket's name
        self.socket = f"{self._folder}/redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = ["--port", "0", "--unixsocket", self.socket, "--save", "", "--appendonly", "no"]
        settings += ["--dir", self._folder, "--daemonize", "no"]
        self._process = subprocess.Popen([self._program, *settings], stdout=subprocess.DEVNULL)
        client = redis.Redis(unix_socket_path=self.socket)
        for _ in range(200):
            try:
                client.ping()
            except redis.ConnectionError:
                time.sleep(0.02)
            else:
                client.close()
                return
        self.remove()
        raise RuntimeError("the Redis server does not answer")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            Path(self.socket).unlink(missing_ok=True)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder)


def new_server() -> RedisProcess:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("needs redis-server or valkey-server, such as `apt-get install redis-server` brings")
    server = RedisProcess(program)
    server.start()
    return server


@pytest.fixture(scope="session")
def server() -> Iterator[RedisProcess]:
    """Give a server that all tests share, each with a prefix of its own."""
    server = new_server()
    yield server
    server.remove()


@pytest.fixture
def own_server() -> Iterator[RedisProcess]:
    """Give a server that a test may kill."""
    server = new_server()
    yield server
    server.remove()


@pytest.fixture
def on_redis(server: RedisProcess) -> RedisServer:
    return RedisServer(server.url, f"{uuid.uuid4()}[*]:")


@pytest.fixture
def in_memory() -> Bucket:
    return Bucket(f"memory://{uuid.uuid4()}/kv")


@pytest.fixture
def in_folder(tmp_path: Path) -> Bucket:
    return Bucket(f"file://{tmp_path}/kv")


@pytest.fixture(params=["in_memory", "in_folder", "on_redis"])
def blobs(request: pytest.FixtureRequest) -> Blobs:
    found: Blobs = request.getfixturevalue(request.param)
    return found


class Cloud(AsyncFileSystem):
    """A bucket that is asked asynchronously and copies what it moves, as those of the large providers are."""

    objects: ClassVar[dict[str, bytes]] = {}
    delay_s: ClassVar[float] = 0.0

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        await asyncio.sleep(self.delay_s)
        return self.objects[self._found(path)]

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.objects[self._strip_protocol(path)] = value

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": self._found(path), "size": len(self.objects[self._found(path)]), "type": "file"}

    async def _rm_file(self, path: str, **options: Any) -> None:
        self.objects.pop(self._strip_protocol(path), None)

    async def _cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.objects[self._strip_protocol(path2)] = self.objects[self._found(path1)]

    async def _ls(self, path: str, detail: bool = True, **options: Any) -> list[dict[str, Any]]:
        start = self._strip_protocol(path) + "/"
        return [await self._info(p) for p in list(self.objects) if p.startswith(start) and "/" not in p[len(start) :]]

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        return

    def _found(self, path: str) -> str:
        if self._strip_protocol(path) not in self.objects:
            raise FileNotFoundError(path)
        return str(self._strip_protocol(path))


class WholeCloud(Cloud):
    """Under a protocol known to show objects whole."""

    protocol = "gs"


class OtherCloud(Cloud):
    """Under one that is not."""

    protocol = "cloud"


class Away(MemoryFileSystem):
    """A remote that can go away; a connection that saw it go stays dead, as those over SSH do."""

    protocol = "away"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    down: ClassVar[bool] = False
    connections: ClassVar[int] = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        type(self).connections += 1
        self.dead = False
        self._check()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("away://")))

    def _check(self) -> None:
        self.dead |= self.down
        if self.dead:
            raise RuntimeError("no route to host")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._check()
        return bytes(super().cat_file(path, start, end, **options))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._check()
        return dict(super().info(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self._check()
        return list(super().ls(path, detail, **options))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._check()
        super().makedirs(path, exist_ok)


class Torn(LocalFileSystem):
    """A disk that is full in the middle of every file."""

    protocol = "torn"
    seen: ClassVar[list[str]] = []

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        Path(path).write_bytes(value[: len(value) // 2])
        self.seen.extend(p.name for p in Path(path).parent.parent.glob("*.kv"))
        raise OSError(errno.ENOSPC, "No space left on device")


class Stubborn(LocalFileSystem):
    """A share where a file does not take the name of another, as over SMB."""

    protocol = "stubborn"

    def mv(self, path1: str, path2: str, recursive: bool = True, **options: Any) -> None:
        if Path(path2).exists():
            raise FileExistsError(errno.EEXIST, "File exists", path2)
        super().mv(path1, path2, recursive, **options)


for system in (WholeCloud, OtherCloud, Away, Torn, Stubborn):
    register_implementation(str(system.protocol), system, clobber=True)


@pytest.fixture
def away() -> Iterator[type[Away]]:
    yield Away
    Away.down = False


class TestMemoryBucket(KVStoreTests):
    @pytest.fixture
    def store(self, in_memory: Bucket) -> Iterator[KVStore]:
        with RemoteStore(in_memory) as store:
            yield store


class TestSharedFolder(KVStoreTests):
    @pytest.fixture
    def store(self, in_folder: Bucket) -> Iterator[KVStore]:
        with RemoteStore(in_folder, numbers="int8") as store:
            yield store


@pytest.mark.parametrize("protocol", ["gs", "cloud"])
class TestAsynchronousBucket(KVStoreTests):
    @pytest.fixture
    def store(self, protocol: str) -> Iterator[KVStore]:
        with RemoteStore(Bucket(f"{protocol}://{uuid.uuid4()}/kv")) as store:
            yield store


class TestRedis(KVStoreTests):
    @pytest.fixture
    def store(self, on_redis: RedisServer) -> Iterator[KVStore]:
        with RemoteStore(on_redis) as store:
            yield store


class TestEncryptedRedis(KVStoreTests):
    @pytest.fixture
    def store(self, on_redis: RedisServer) -> Iterator[KVStore]:
        with RemoteStore(on_redis, seal=Seal(SECRET), numbers="fp8") as store:
            yield store


class TestMemoryOverRedis(KVStoreTests):
    @pytest.fixture
    def store(self, on_redis: RedisServer) -> Iterator[KVStore]:
        with TieredStore(MemoryStore(1 << 20), RemoteStore(on_redis)) as store:
            yield store


class TestTenantOfABucket(KVStoreTests):
    @pytest.fixture
    def store(self, in_memory: Bucket) -> KVStore:
        return TenantStore(RemoteStore(in_memory), "orla", SECRET)


DAMAGE: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: b"", "truncated: 0 bytes"),
    (lambda data: data[:50], "truncated: 50 bytes"),
    (lambda data: data[: PREAMBLE.size + 10], "truncated header"),
    (lambda data: data[:-1], "truncated: .* bytes of"),
    (lambda data: data + b"\0", "truncated: .* bytes of"),
    (lambda data: b"X" + data[1:], "not a stored chunk"),
    (lambda data: flip(data, PREAMBLE.size + 20), "header checksum differs"),
    (lambda data: b"".join(encode(example_key(7), example_chunk())), "entry of another chunk: ids differ"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_blob_is_a_miss_goes_into_quarantine_and_heals(
    blobs: Blobs, damage: Callable[[bytes], bytes], reason: str
) -> None:
    store = RemoteStore(blobs)
    blobs.write(NAME, [damage(ENTRY)])
    found = store.get(example_key())
    assert isinstance(found, Miss)
    assert re.search(reason, found.reason), found.reason
    assert example_key() not in store
    assert store.get(example_key()) == Miss("absent")
    [(name, size)] = blobs.names("quarantine")
    assert re.fullmatch(rf"quarantine/{example_key().address}-[0-9a-f]{{8}}\.kv", name)
    assert (blobs.read(name), size) == (damage(ENTRY), len(damage(ENTRY)))
    store.put(example_key(), example_chunk())
    assert_same(store.get(example_key()), example_chunk())
    [stats] = store.stats()
    assert (stats.entries, stats.size_bytes) == (1, len(ENTRY) + size)
    assert (stats.hits, stats.misses, stats.discarded, stats.limit_bytes) == (1, 2, 1, None)
    assert store.clear() == 1
    assert list(blobs.names("quarantine")) == []


def test_a_damaged_block_is_found_when_it_is_read(blobs: Blobs) -> None:
    blobs.write(NAME, [flip(ENTRY, -1)])
    found = RemoteStore(blobs).get(example_key())
    assert isinstance(found, ChunkKV)
    with pytest.raises(CorruptEntry, match=r"block value\.2 differs"):
        found.read()
    store = TieredStore(MemoryStore(), RemoteStore(blobs))
    assert store.get(example_key()) == Miss("checksum of block value.2 differs")
    assert example_key() not in store
    store.put(example_key(), example_chunk())
    assert_same(store.get(example_key()), example_chunk())


def test_a_planted_pickle_is_refused_and_not_executed(blobs: Blobs, tmp_path: Path) -> None:
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (marker,))

    planted = pickle.dumps((Bomb(), bytes(PREAMBLE.size)))
    blobs.write(NAME, [planted])
    assert RemoteStore(blobs).open(example_key().address) == Miss("not a stored chunk")
    blobs.write(NAME, [planted])
    assert RemoteStore(blobs).get(example_key()) == Miss("not a stored chunk")
    assert not marker.exists()


def test_a_planted_key_that_is_no_text_is_a_miss(blobs: Blobs) -> None:
    planted = replace(example_key(), namespace="\ud800")
    blobs.write("0-1.kv", encode(planted, example_chunk()))
    assert isinstance(RemoteStore(blobs).open("0-1"), Miss)
    assert list(blobs.names()) == []


def test_an_entry_is_opened_under_its_own_address_only(blobs: Blobs) -> None:
    blobs.write("0123.kv", [ENTRY])
    assert RemoteStore(blobs).open("0123") == Miss("entry of another chunk: address differ")


def test_addresses_of_tenants_are_names_like_others(blobs: Blobs) -> None:
    store, key = RemoteStore(blobs), replace(example_key(), namespace="token")
    store.put(key, example_chunk())
    assert list(blobs.names()) == [(f"{key.address}.kv", len(b"".join(encode(key, example_chunk()))))]
    assert [entry.address for entry in store.entries()] == [key.address]
    assert key.address.startswith(tenant_prefix("token"))
    assert not isinstance(store.open(key.address), Miss)


def test_what_else_lies_there_is_no_entry(blobs: Blobs) -> None:
    store = RemoteStore(blobs)
    store.put(example_key(), example_chunk())
    blobs.write("README.txt", [b"hands off"])
    blobs.write("elsewhere-1.probe", [b"1"])
    assert [entry.address for entry in store.entries()] == [example_key().address]
    assert store.clear() == 1
    assert blobs.read("README.txt") == b"hands off"


def test_names_that_are_not_there_are_said_not_to_be(blobs: Blobs) -> None:
    assert blobs.read("none") is None
    assert not blobs.exists("none")
    assert not blobs.delete("none")
    assert not blobs.rename("none", "other")
    assert list(blobs.names()) == list(blobs.names("quarantine")) == []


def test_a_sealed_entry_tells_nothing_and_opens_under_its_secret_only(blobs: Blobs) -> None:
    RemoteStore(blobs, seal=Seal(SECRET)).put(example_key(), example_chunk())
    [(name, _)] = blobs.names()
    data = blobs.read(name)
    assert data is not None
    assert b"framed" not in data
    assert example_chunk().blocks["key.0"].numpy().tobytes() not in data
    assert RemoteStore(blobs).get(example_key()) == Miss("is encrypted and no secret was given")
    blobs.write(name, [data])
    other = RemoteStore(blobs, seal=Seal(bytes(32))).get(example_key())
    assert other == Miss("cannot be decrypted: changed, or written under another secret")
    blobs.write(name, [data])
    assert_same(RemoteStore(blobs, seal=Seal(SECRET)).get(example_key()), example_chunk())
    blobs.write(name, [ENTRY])
    assert isinstance(RemoteStore(blobs, seal=Seal(SECRET)).get(example_key()), Miss)


def test_entries_expire(blobs: Blobs) -> None:
    store = RemoteStore(blobs, ttl_s=2.0)
    store.put(example_key(), example_chunk())
    assert_same(store.get(example_key()), example_chunk())
    time.sleep(2.05)
    assert store.get(example_key()) == Miss("absent" if blobs.kind == "redis" else "expired")
    assert example_key() not in store
    assert list(blobs.names()) == []
    assert store.stats()[0].discarded == 0


def test_an_expiry_the_chunk_brings_counts_before_that_of_the_store(server: RedisProcess) -> None:
    blobs = RedisServer(server.url, "until:")
    RemoteStore(blobs, ttl_s=1000.0).put(example_key(), example_chunk().until(time.time() + 50.0))
    left_ms = redis.Redis(unix_socket_path=server.socket).pttl(f"until:{NAME}")
    assert 40_000 < left_ms <= 50_000


def test_narrow_entries_stay_narrow(blobs: Blobs) -> None:
    RemoteStore(blobs, numbers="int8").put(example_key(), example_chunk())
    narrow = RemoteStore(blobs).get(example_key())
    assert isinstance(narrow, ChunkKV)
    assert narrow.numbers == "int8"
    RemoteStore(blobs).put(example_key(), narrow)
    assert_same(RemoteStore(blobs).get(example_key()), narrow)


def test_another_client_sees_what_one_wrote_and_removed(in_folder: Bucket, tmp_path: Path) -> None:
    ours, theirs = RemoteStore(in_folder), open_remote(f"{tmp_path}/kv")
    assert example_key() not in theirs
    ours.put(example_key(), example_chunk())
    assert_same(theirs.get(example_key()), example_chunk())
    theirs.discard(example_key())
    assert example_key() not in ours


@pytest.mark.parametrize("before", [None, ENTRY])
def test_a_write_that_fails_shows_nothing_under_the_final_name(tmp_path: Path, before: bytes | None) -> None:
    if before is not None:
        Bucket(f"file://{tmp_path}").write(NAME, [before])
    Torn.seen.clear()
    store = RemoteStore(Bucket(f"torn://{tmp_path}"))
    with pytest.raises(StoreError, match=r"remote torn failed: .*No space left on device"):
        store.put(example_key(), example_chunk(5))
    names = [NAME] if before is not None else []
    assert Torn.seen == names
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == names
    if before is not None:
        assert_same(store.get(example_key()), example_chunk())
    else:
        assert store.get(example_key()) == Miss("absent")


def test_a_share_where_a_file_takes_no_others_name_still_replaces(tmp_path: Path) -> None:
    store = RemoteStore(Bucket(f"stubborn://{tmp_path}"))
    store.put(example_key(), example_chunk(1))
    store.put(example_key(), example_chunk(2))
    assert_same(store.get(example_key()), example_chunk(2))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [NAME]


def test_what_a_dead_writer_left_is_no_entry(in_folder: Bucket, tmp_path: Path) -> None:
    store = RemoteStore(in_folder)
    store.put(example_key(), example_chunk())
    (tmp_path / "kv" / "tmp" / f"{'0' * 32}.part").write_bytes(ENTRY[:100])
    (tmp_path / "kv" / "tmp" / "0.kv").write_bytes(ENTRY[:100])
    assert [entry.address for entry in store.entries()] == [example_key().address]
    assert store.stats()[0].size_bytes == len(ENTRY)


class TestRemoteThatIsAway:
    def test_a_bucket(self, away: type[Away]) -> None:
        store = RemoteStore(Bucket("away://bucket/kv"), rest_s=0.3)
        store.put(example_key(), example_chunk())
        away.down = True
        self.check_that_it_is_missed(store, "remote away cannot be reached: no route to host")
        away.down = False
        self.check_that_it_comes_back(store)

    def test_it_is_not_asked_again_for_a_while(self, away: type[Away]) -> None:
        store = RemoteStore(Bucket("away://resting/kv"), rest_s=1000.0)
        away.down = True
        assert isinstance(store.get(example_key()), Miss)
        tried = away.connections
        assert {store.get(example_key(number)) for number in range(10)} == {
            Miss("remote away cannot be reached: no route to host")
        }
        with pytest.raises(StoreError, match="remote away cannot be reached: no route to host"):
            store.put(example_key(), example_chunk())
        assert away.connections == tried

    def test_a_killed_redis(self, own_server: RedisProcess) -> None:
        store = RemoteStore(RedisServer(own_server.url, timeout_s=0.5), rest_s=0.3)
        store.put(example_key(), example_chunk())
        own_server.kill()
        self.check_that_it_is_missed(store, "remote redis cannot be reached: Error 2 connecting to ")
        own_server.start()
        store.health()
        store.put(example_key(), example_chunk())
        self.check_that_it_comes_back(store)

    def test_a_redis_that_hangs(self, own_server: RedisProcess) -> None:
        store = RemoteStore(RedisServer(own_server.url, timeout_s=0.2), rest_s=0.5)
        store.put(example_key(), example_chunk())
        own_server.pause()
        try:
            self.check_that_it_is_missed(store, "remote redis cannot be reached: Timeout reading from ")
        finally:
            own_server.resume()
        self.check_that_it_comes_back(store)

    def test_a_bucket_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = RemoteStore(Bucket("gs://hanging/kv", timeout_s=1.0), rest_s=60.0)
        store.put(example_key(), example_chunk())
        monkeypatch.setattr(Cloud, "delay_s", 60.0)
        started = time.monotonic()
        found = [store.get(example_key()) for _ in range(10)]
        assert found == [Miss("remote gs cannot be reached: no answer in time")] * 10
        assert time.monotonic() - started < 8.0  # it was asked once, and left alone for the other nine
        monkeypatch.setattr(Cloud, "delay_s", 0.0)
        store._rest_s = store._resting_until = 0.0
        self.check_that_it_comes_back(store)

    @pytest.mark.parametrize("url", ["unix:///nonexistent/redis.sock", "away://bucket/kv"])
    def test_one_that_was_never_there(self, away: type[Away], url: str) -> None:
        away.down = True
        with open_remote(url) as store:
            found = store.get(example_key())
            assert isinstance(found, Miss)
            assert re.match("remote (redis|away) cannot be reached: ", found.reason)

    def test_only_one_caller_tries_whether_it_is_back(self, away: type[Away]) -> None:
        store = RemoteStore(Bucket("away://once/kv"), rest_s=0.5)
        away.down = True
        store.get(example_key())
        time.sleep(0.55)
        tried, waiting = [], threading.Barrier(8)

        def slow(name: str) -> None:
            tried.append(name)
            time.sleep(0.1)
            raise RuntimeError("no route to host")

        store._rest_s = 60.0  # so that none of those who ask comes after the next rest
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
        started = time.monotonic()
        found = [store.get(example_key(number)) for number in range(10)]
        assert all(isinstance(one, Miss) for one in found)
        assert [one.reason.startswith(reason) for one in found] == [True] * 10, found
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
        assert time.monotonic() - started < 20.0

    def check_that_it_comes_back(self, store: RemoteStore) -> None:
        time.sleep(store._rest_s)
        assert_same(store.get(example_key()), example_chunk())
        assert store.health()[0].ok
        assert len(list(store.entries())) == 1


def test_health_ends_a_rest_that_is_over(away: type[Away]) -> None:
    store = RemoteStore(Bucket("away://rest/kv"), rest_s=1000.0)
    away.down = True
    assert isinstance(store.get(example_key()), Miss)
    away.down = False
    assert store.get(example_key()) == Miss("remote away cannot be reached: no route to host")
    assert store.health()[0].ok
    assert store.get(example_key()) == Miss("absent")


def test_health_leaves_nothing_behind(blobs: Blobs) -> None:
    assert RemoteStore(blobs).health()[0].to_dict() == {"kind": f"remote {blobs.kind}", "ok": True, "problems": ()}
    assert list(blobs.names()) == []


def test_health_tells_of_a_remote_that_forgets(in_memory: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "write", lambda *arguments: None)
    [health] = RemoteStore(in_memory).health()
    assert health.problems == ("does not give back what it was given; is it full, or is there a proxy in between?",)


def test_one_bad_blob_does_not_make_the_others_wait(server: RedisProcess) -> None:
    client = redis.Redis(unix_socket_path=server.socket)
    client.lpush(f"poisoned:{NAME}", "a list")
    store = RemoteStore(RedisServer(server.url, "poisoned:"))
    store.put(example_key(1), example_chunk(1))
    found = store.get(example_key())
    assert isinstance(found, Miss)
    assert found.reason.startswith("remote redis failed: WRONGTYPE")
    assert_same(store.get(example_key(1)), example_chunk(1))
    assert [entry.address for entry in store.entries()] == [example_key(1).address]
    store.put(example_key(), example_chunk())
    assert_same(store.get(example_key()), example_chunk())


def test_a_full_redis_is_an_error_of_the_put_alone(own_server: RedisProcess) -> None:
    store = RemoteStore(RedisServer(own_server.url))
    store.put(example_key(), example_chunk())
    redis.Redis(unix_socket_path=own_server.socket).config_set("maxmemory", 1)
    with pytest.raises(StoreError, match=r"remote redis failed: .*maxmemory"):
        store.put(example_key(1), example_chunk(1))
    assert_same(store.get(example_key()), example_chunk())
    assert "maxmemory" in store.health()[0].problems[0]


def test_two_prefixes_of_one_server_are_two_stores(server: RedisProcess) -> None:
    one, two = (RemoteStore(RedisServer(server.url, prefix)) for prefix in ("one?:", "one!:"))
    one.put(example_key(), example_chunk())
    assert example_key() not in two
    assert list(two.entries()) == []
    assert two.clear() == 0
    assert example_key() in one


def test_many_entries_are_listed_in_steps(on_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcfuse_rag.store.redis.LISTED_AT_ONCE", 7)
    for number in range(50):
        on_redis.write(f"{number}.kv", [bytes(number)])
    assert sorted(on_redis.names()) == sorted((f"{number}.kv", number) for number in range(50))


def test_a_missing_client_library_is_an_error_that_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StoreError, match=re.escape("pip install 'qcfuse-rag[remote]'")):
        Bucket("memory://x")
    with pytest.raises(StoreError, match=re.escape("pip install 'qcfuse-rag[redis]'")):
        RedisServer("redis://localhost")


@pytest.mark.parametrize("url", ["nowhere://x", "redis+nothing://x"])
def test_a_url_that_nothing_understands_is_an_error(url: str) -> None:
    with pytest.raises(StoreError, match="cannot use URLs that begin with"):
        open_remote(url)


def test_a_redis_url_that_is_none_does_not_show_its_password() -> None:
    with pytest.raises(StoreError, match="a Redis URL begins with") as caught:
        open_remote("redis://:secret@host:port/0")
    assert "secret" not in str(caught.value)


def test_a_format_that_is_none_is_an_error(in_memory: Bucket) -> None:
    with pytest.raises(ValueError, match="no format of numbers 'int3'"):
        RemoteStore(in_memory, numbers="int3")


def flip(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)
