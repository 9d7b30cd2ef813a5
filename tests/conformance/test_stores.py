"""Every store does what the contract says; the disk store survives what disks and strangers do."""

from __future__ import annotations

import os
import pickle
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qcfuse_rag import CorruptEntry, DiskStore, KVStore, MemoryStore, Miss, StoreError, TieredStore
from qcfuse_rag.store.format import PREAMBLE, encode
from qcfuse_rag.store.layout import ALIGNMENT
from qcfuse_rag.store.reader import MemorySource, open_chunk
from qcfuse_rag.store.testing import FINGERPRINT, KVStoreTests, assert_same, example_chunk, example_key


class TestMemoryStore(KVStoreTests):
    @pytest.fixture
    def store(self) -> KVStore:
        return MemoryStore(limit_bytes=1 << 20)

    def test_never_holds_more_than_its_limit(self) -> None:
        size = example_chunk().nbytes
        store = MemoryStore(limit_bytes=3 * size)
        for number in range(5):
            store.put(example_key(number), example_chunk(number))
            assert store.stats()[0].size_bytes <= 3 * size
        assert [example_key(number) in store for number in range(5)] == [False, False, True, True, True]

    def test_forgets_the_least_recently_used(self) -> None:
        store = MemoryStore(limit_bytes=2 * example_chunk().nbytes)
        store.put(example_key(0), example_chunk(0))
        store.put(example_key(1), example_chunk(1))
        store.get(example_key(0))
        store.put(example_key(2), example_chunk(2))
        assert example_key(0) in store
        assert example_key(1) not in store

    def test_a_chunk_larger_than_the_limit_is_an_error(self) -> None:
        with pytest.raises(StoreError, match="does not fit a memory store of 10 bytes"):
            MemoryStore(limit_bytes=10).put(example_key(), example_chunk())


class TestDiskStore(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with DiskStore(tmp_path / "kv") as store:
            yield store

    def test_survives_a_restart(self, tmp_path: Path) -> None:
        with DiskStore(tmp_path) as store:
            store.put(example_key(), example_chunk())
        with DiskStore(tmp_path) as store:
            assert_same(store.get(example_key()), example_chunk())

    def test_another_process_reads_what_this_one_wrote(self, tmp_path: Path) -> None:
        with DiskStore(tmp_path) as store:
            store.put(example_key(), example_chunk())
            program = (
                "import sys; from qcfuse_rag import DiskStore; from qcfuse_rag.store import testing as t;"
                "t.assert_same(DiskStore(sys.argv[1]).get(t.example_key()), t.example_chunk())"
            )
            subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)

    def test_files_are_for_their_owner_only(self, tmp_path: Path) -> None:
        with DiskStore(tmp_path) as store:
            store.put(example_key(), example_chunk())
        assert [oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*.val")] == ["0o600"] * 2

    def test_another_models_chunks_are_a_miss_that_names_the_difference(self, store: KVStore) -> None:
        store.put(example_key(), example_chunk())
        other = replace(example_key(), fingerprint=replace(FINGERPRINT, weights="tuned", dtype="bfloat16"))
        assert store.get(other) == Miss("absent: the store holds chunks of another model, weights, dtype differ")

    def test_a_folder_that_cannot_be_used_is_one_clear_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot open a store in"):
            DiskStore(tmp_path / "file")

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (lambda data: data[:100], "truncated"),
            (lambda data: data[: len(data) // 2], "truncated in block"),
            (lambda data: b"", "cannot be read|truncated"),
            (lambda data: b"X" + data[1:], "not a stored chunk"),
            (lambda data: data[:8] + b"\x07" + data[9:], "format version 7"),
            (lambda data: flip(data, PREAMBLE.size + 20), "header checksum differs"),
            (lambda data: flip(data, -ALIGNMENT), "checksum of block value.2 differs"),
        ],
    )
    def test_damage_is_a_miss_with_a_reason_and_is_removed(self, tmp_path: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
        with TieredStore(MemoryStore(), DiskStore(tmp_path)) as store:
            store.far.put(example_key(), example_chunk())
            [path] = [p for p in tmp_path.rglob("*.val") if p.stat().st_size > ALIGNMENT]
            path.write_bytes(damage(path.read_bytes()))
            found = store.get(example_key())
            assert isinstance(found, Miss)
            assert re.search(reason, found.reason), found.reason
            assert example_key() not in store
            store.put(example_key(), example_chunk())
            assert_same(store.get(example_key()), example_chunk())

    def test_a_file_that_vanished_is_a_miss_and_the_entry_goes(self, tmp_path: Path) -> None:
        with DiskStore(tmp_path) as store:
            store.put(example_key(), example_chunk())
            for path in tmp_path.rglob("*.val"):
                path.unlink()
            assert store.get(example_key()) == Miss("its file is missing")
            assert example_key() not in store

    @pytest.mark.parametrize("content", [None, b"", b"no JSON"])
    def test_an_unreadable_record_of_a_model_does_not_lock_the_store(self, tmp_path: Path, content: bytes) -> None:
        with DiskStore(tmp_path) as store:
            store.put(example_key(), example_chunk())
            [row] = store._cache._sql("SELECT filename FROM Cache WHERE key LIKE 'model-%'")
        path = tmp_path / str(row[0])
        path.unlink() if content is None else path.write_bytes(content)
        with DiskStore(tmp_path) as store:
            assert_same(store.get(example_key()), example_chunk())

    def test_a_write_that_fails_leaves_nothing_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with DiskStore(tmp_path) as store:
            monkeypatch.setattr(os, "fsync", full)
            with pytest.raises(StoreError, match="No space left on device"):
                store.put(example_key(), example_chunk())
            assert list(tmp_path.rglob("*.val")) == []

    def test_a_planted_pickle_is_not_executed(self, tmp_path: Path) -> None:
        marker = tmp_path / "executed"

        class Bomb:
            def __reduce__(self) -> tuple[object, ...]:
                return (Path.touch, (marker,))

        with DiskStore(tmp_path / "kv") as store:
            store.put(example_key(), example_chunk())
        database = sqlite3.connect(tmp_path / "kv" / "cache.db")
        mode_pickle = 4
        with database:
            database.execute(
                "UPDATE Cache SET mode = ?, filename = NULL, value = ?", (mode_pickle, pickle.dumps(Bomb()))
            )
            database.execute("DELETE FROM Cache WHERE key LIKE 'model-%'")
        with DiskStore(tmp_path / "kv") as store:
            found = store.get(example_key())
        assert found == Miss("the index holds a value that is not a file of bytes; it was not read")
        assert not marker.exists()

    def test_a_planted_pickle_as_key_keeps_the_store_from_opening(self, tmp_path: Path) -> None:
        with DiskStore(tmp_path) as store:
            store.put(example_key(), example_chunk())
        with sqlite3.connect(tmp_path / "cache.db") as database:
            database.execute("UPDATE Cache SET key = ?, raw = 0 WHERE rowid = 1", (pickle.dumps(print),))
        with pytest.raises(StoreError, match="a key that is not text"):
            DiskStore(tmp_path)

    def test_evicts_beyond_its_limit(self, tmp_path: Path) -> None:
        entry = len(encode(example_key(), example_chunk()))
        with DiskStore(tmp_path, limit_bytes=20 * entry) as store:
            for number in range(60):
                store.put(example_key(number), example_chunk(number))
            stats = store.stats()[0]
            assert stats.size_bytes <= 22 * entry
            assert isinstance(store.get(example_key(0)), Miss)
            assert_same(store.get(example_key(59)), example_chunk(59))


class TestTieredStore(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with TieredStore(MemoryStore(1 << 20), DiskStore(tmp_path / "kv")) as store:
            yield store

    def test_reading_from_far_brings_near(self, tmp_path: Path) -> None:
        with TieredStore(MemoryStore(), DiskStore(tmp_path)) as store:
            store.far.put(example_key(), example_chunk())
            assert_same(store.get(example_key()), example_chunk())
            assert example_key() in store.near

    def test_prefetch_brings_near_by_itself(self, tmp_path: Path) -> None:
        store = TieredStore(MemoryStore(), DiskStore(tmp_path))
        store.far.put(example_key(), example_chunk())
        store.prefetch([example_key()])
        store._reader.shutdown(wait=True)
        assert example_key() in store.near

    def test_a_near_tier_too_small_does_not_stand_in_the_way(self, tmp_path: Path) -> None:
        with TieredStore(MemoryStore(limit_bytes=10), DiskStore(tmp_path)) as store:
            store.put(example_key(), example_chunk())
            assert_same(store.get(example_key()), example_chunk())


ENTRY = encode(example_key(), example_chunk())


@given(position=st.integers(0, len(ENTRY) - 1), change=st.integers(1, 255))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_changed_byte_goes_unnoticed_unless_it_is_padding(position: int, change: int) -> None:
    """Whatever byte of an entry changes: it is refused, or what is read is what was written."""
    data = bytearray(ENTRY)
    data[position] ^= change
    try:
        found = decode(memoryview(data), example_key())
        blocks = {name: found.blocks[name] for name in found.names()}
    except CorruptEntry:
        return
    assert all(torch.equal(blocks[name], tensor) for name, tensor in example_chunk().blocks.items())


@given(length=st.integers(0, len(ENTRY) - 1))
@settings(max_examples=50, deadline=None)
def test_a_truncated_entry_is_refused_or_lacks_only_padding(length: int) -> None:
    try:
        found = decode(memoryview(bytearray(ENTRY[:length])), example_key())
        blocks = {name: found.blocks[name] for name in found.names()}
    except CorruptEntry:
        return
    assert all(torch.equal(blocks[name], tensor) for name, tensor in example_chunk().blocks.items())


def test_blocks_stand_in_reading_order_and_are_aligned() -> None:
    chunk = decode(memoryview(bytearray(ENTRY)), example_key())
    offsets = [chunk.blocks._blocks[name]["offset"] for name in chunk.names()]  # type: ignore[attr-defined]
    assert offsets == sorted(offsets)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert chunk.names()[:3] == ["ranking", "key.0", "value.0"]


def test_an_entry_of_another_key_is_refused_by_name() -> None:
    with pytest.raises(CorruptEntry, match="base differ"):
        decode(memoryview(bytearray(ENTRY)), replace(example_key(), base="blind"))


def flip(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)
