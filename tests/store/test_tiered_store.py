"""A fast store in front of a slow one: promotion, and errors of both."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore, MemoryStore, TieredStore, open_store
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
from qcfuse_rag.store.backends.remote import RemoteStore
from qcfuse_rag.store.backends.tenant import TenantStore
from qcfuse_rag.store.chunk import ChunkKV, to_format
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key

KEY = example_key()
SIZE = example_chunk().nbytes
PATIENCE_S = 20.0


class Watched(MemoryStore):
    """Tells when something was put."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        super().__init__(limit_bytes)
        self.was_put = threading.Event()

    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        super().put(key, chunk, saved_ms=saved_ms)
        self.was_put.set()


def put(store: TieredStore, *numbers: int) -> None:
    for number in numbers:
        store.put(example_key(number), example_chunk(number))


# Reading.


def test_what_is_read_from_far_comes_near(tmp_path: Path) -> None:
    with TieredStore(MemoryStore(), DiskStore(tmp_path)) as store:
        store.far.put(KEY, example_chunk())
        assert KEY not in store.near
        assert_same(store.get(KEY), example_chunk())
        assert KEY in store.near
        (tmp_path / "objects").rename(tmp_path / "elsewhere")
        assert_same(store.get(KEY), example_chunk())


def test_a_disk_that_fails_under_a_chunk_is_a_miss_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*place: int) -> memoryview:
        raise OSError(5, "Input/output error")

    with TieredStore(MemoryStore(), DiskStore(tmp_path)) as store:
        store.far.put(KEY, example_chunk())
        found = store.far.get(KEY)
        assert isinstance(found, ChunkKV)
        with monkeypatch.context() as patch:
            patch.setattr(found.blocks._entry, "read", broken)  # type: ignore[attr-defined]
            patch.setattr(store.far, "get", lambda key: found)
            assert store.get(KEY) == Miss("cannot be read: [Errno 5] Input/output error")
        assert_same(store.get(KEY), example_chunk())


def test_prefetch_brings_near_by_itself() -> None:
    near = Watched()
    with TieredStore(near, MemoryStore()) as store:
        store.far.put(KEY, example_chunk())
        store.prefetch([example_key(1), KEY])
        assert near.was_put.wait(PATIENCE_S)
        assert_same(near.get(KEY), example_chunk())


def test_a_near_tier_that_cannot_take_the_new_chunk_does_not_keep_the_old_one() -> None:
    with TieredStore(MemoryStore(limit_bytes=SIZE), MemoryStore()) as store:
        put(store, 0)
        store.put(KEY, example_chunk(1, n_tokens=50))
        assert_same(store.get(KEY), example_chunk(1, n_tokens=50))


def test_if_the_far_tier_cannot_be_written_the_near_one_is_not(tmp_path: Path) -> None:
    with TieredStore(MemoryStore(), MemoryStore(limit_bytes=10)) as store:
        with pytest.raises(StoreError, match="does not fit"):
            put(store, 0)
        assert KEY not in store


def test_an_entry_of_several_tiers_is_one_entry() -> None:
    with TieredStore(MemoryStore(), TieredStore(MemoryStore(), MemoryStore())) as store:
        put(store, 0)
        store.near.put(example_key(1), example_chunk(1))
        assert sorted(entry.address for entry in store.entries()) == sorted(example_key(n).address for n in (0, 1))
        assert store.clear() == 2
        assert [tier.stats()[0].entries for tier in store.tiers] == [0, 0, 0]


def test_what_is_pinned_is_kept_in_every_tier() -> None:
    with TieredStore(MemoryStore(2 * SIZE), MemoryStore(3 * SIZE)) as store:
        put(store, 0)
        assert store.pin(KEY)
        put(store, *range(1, 6))
        assert [KEY in tier for tier in store.tiers] == [True, True]


def test_a_far_tier_that_is_away_can_be_done_without_where_the_near_one_suffices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*args: object, **kwargs: object) -> None:
        raise StoreError("the remote is away")

    far = MemoryStore()
    monkeypatch.setattr(far, "put", away)
    with TieredStore(DiskStore(tmp_path), far, near_suffices=True) as store:
        put(store, 0, 1)
        assert_same(store.get(KEY), example_chunk())
        with pytest.raises(StoreError, match="2 chunks are in the disk tier only: the remote is away"):
            store.flush()
        store.flush()
    with pytest.raises(StoreError, match="does not fit"):
        TieredStore(MemoryStore(1), MemoryStore(1), near_suffices=True).put(KEY, example_chunk())


def test_no_tier_keeps_an_entry_longer_than_the_far_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TieredStore(MemoryStore(), DiskStore(tmp_path, ttl_s=60.0)) as store:
        put(store, 0)
        assert_same(store.get(KEY), example_chunk())
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 61.0)
        assert store.get(KEY) == Miss("expired")


# Numbers: whichever tier answers, it answers the same.


def test_a_near_tier_of_other_digits_than_the_far_one_is_refused() -> None:
    with pytest.raises(StoreError, match="the near store keeps int8 and the far one model"):
        TieredStore(MemoryStore(kv_dtype="int8"), MemoryStore(kv_dtype="model"))


@pytest.mark.parametrize("near", ["model", "int8"])
def test_every_tier_answers_the_same_numbers(near: str) -> None:
    with TieredStore(MemoryStore(kv_dtype=near), MemoryStore(kv_dtype="int8")) as store:
        put(store, 0)
        answers = [store.near.get(KEY), store.far.get(KEY)]
        store.near.clear()
        answers += [store.get(KEY), store.get(KEY)]
        expected = to_format(example_chunk(), "int8").layer(2)
        for answer in answers:
            assert isinstance(answer, ChunkKV)
            assert all(torch.equal(block, other) for block, other in zip(answer.layer(2), expected, strict=True))


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_a_store_opened_again_keeps_its_kv_dtype_in_memory_too(tmp_path: Path, kv_dtype: str) -> None:
    open_store(tmp_path, kv_dtype=kv_dtype).close()
    with open_store(tmp_path) as store:
        assert [tier.kv_dtype for tier in store.tiers] == [kv_dtype, kv_dtype]


def test_a_folder_knows_the_remote_behind_it_but_not_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, kept in (
        ("bucket", str(tmp_path / "bucket")),
        ("redis://me:secret@host:1/0?password=secret&protocol=3", "redis://me@host:1/0?protocol=3"),
        ("s3://bucket/kv", "s3://bucket/kv"),
        ("unix:///tmp/redis.sock?db=0&ssl_password=x", "unix:///tmp/redis.sock?db=0"),
        ("rediss://:secret@host/0", "rediss://host/0"),
        ("memory:///x", "memory:///x"),
        ("https://host/kv?sas_token=abc", "https://host/kv"),
    ):
        with DiskStore(tmp_path / "kv", remote=given) as disk:
            assert disk.settings.remote == kept
    for given, tiers in (("bucket", 3), (None, 3), ("", 2), (None, 2)):
        with open_store(tmp_path / "kv", remote=given) as store:
            assert len(store.tiers) == tiers, "an empty one takes it away"


def test_uses_of_the_tier_in_memory_count_where_the_disk_evicts(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as probe:
        probe.put(KEY, example_chunk())
        entry_bytes = probe.stats()[0].size_bytes
        probe.clear()
    with TieredStore(MemoryStore(), DiskStore(tmp_path, int(2.5 * entry_bytes), eviction="lfu")) as store:
        put(store, 1, 2)
        for _ in range(20):
            store.get(example_key(1))
        put(store, 3)
        assert [example_key(number) in store.far for number in (1, 2, 3)] == [True, False, True]


def test_what_only_a_nearer_tier_knows_of_an_entry_is_told(tmp_path: Path) -> None:
    remote = RemoteStore(FsspecBlobs(f"file://{tmp_path}/remote"))
    with TieredStore(DiskStore(tmp_path / "disk"), remote) as store:
        put(store, 1)
        [far], [entry] = remote.entries(), store.entries()
        assert far.uses is None
        assert entry.uses is not None
        assert entry.size_bytes == far.size_bytes


def test_a_store_that_cannot_be_cleared_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(tmp_path) as disk:
        tenant = TenantStore(disk, "ann", bytes(32))
        tenant.put(KEY, example_chunk())
        monkeypatch.setattr(disk, "discard", lambda *_: False)
        with pytest.raises(StoreError, match="1 of 1 entries"):
            tenant.clear()


def test_a_remote_that_cannot_be_used_is_not_remembered(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot use URLs that begin with nosuch"):
        open_store(tmp_path, remote="nosuch://bucket")
    with open_store(tmp_path) as store:
        assert len(store.tiers) == 2
