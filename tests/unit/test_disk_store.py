"""The store on disk: within its limit at every moment, and never worse than a miss, whatever disks and strangers do."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qcfuse_rag import CorruptEntry, DiskStore, MemoryStore, Miss, StoreError, TieredStore
from qcfuse_rag.store.files import place
from qcfuse_rag.store.format import encode
from qcfuse_rag.store.room import Room
from qcfuse_rag.store.seal import Seal
from qcfuse_rag.store.sources import Sources
from qcfuse_rag.store.testing import FINGERPRINT, assert_same, example_chunk, example_key

SECRET = bytes(range(32))
KEY = example_key()
ENTRY = sum(len(part) for part in encode(KEY, example_chunk()))
"""Bytes of an example's file."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    with DiskStore(folder) as store:
        yield store


def file_of(store: DiskStore, number: int = 0) -> Path:
    return store.files.path(example_key(number).address)


def taken(folder: Path) -> int:
    """Return the bytes of entries, of what is being written, and of what is in quarantine."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.suffix in (".kv", ".part"))


def put(store: DiskStore, *numbers: int, **options: float) -> None:
    for number in numbers:
        store.put(example_key(number), example_chunk(number), **options)


def present(store: DiskStore, count: int) -> list[bool]:
    return [example_key(number) in store for number in range(count)]


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + seconds)


# What is kept, and for whom.


def test_a_restart_loses_nothing(folder: Path) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
    with DiskStore(folder) as store:
        assert_same(store.get(KEY), example_chunk())
        assert store.stats()[0].entries == 2


def in_a_child(work: Callable[[], None]) -> int:
    """Run something in another process, which may be killed for it; return its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_another_process_reads_what_this_one_wrote_and_the_other_way_round(store: DiskStore, folder: Path) -> None:
    def read_and_write() -> None:
        with DiskStore(folder) as other:
            assert_same(other.get(KEY), example_chunk())
            put(other, 1)

    put(store, 0)
    assert in_a_child(read_and_write) == 0
    assert_same(store.get(example_key(1)), example_chunk(1))
    assert store.stats()[0].size_bytes == 2 * ENTRY


def test_two_that_have_it_open_share_it(store: DiskStore, folder: Path) -> None:
    with DiskStore(folder) as other:
        put(store, 0)
        put(other, 1)
        assert_same(store.get(example_key(1)), example_chunk(1))
        assert_same(other.get(KEY), example_chunk())
        assert store.stats()[0].entries == other.stats()[0].entries == 2
        assert other.discard(KEY)
        assert KEY not in store


def test_everything_is_for_its_owner_only(folder: Path) -> None:
    before = os.umask(0)
    try:
        with DiskStore(folder) as store:
            put(store, 0, 1)
            with closing(Sources(store)) as sources:  # open while the modes are looked at, with its journal
                sources.replace("document", [KEY])
                store.discard(KEY, "looks odd")
                modes = {p: p.stat().st_mode & 0o777 for p in (folder, *folder.rglob("*"))}
    finally:
        os.umask(before)
    assert {p.name for p in modes} >= {"cache.db", "sources.db", "store.json", "quarantine", "objects"}
    assert {p: oct(mode) for p, mode in modes.items() if mode != (0o700 if p.is_dir() else 0o600)} == {}


def test_another_models_chunks_are_a_miss_that_names_the_difference(store: DiskStore, folder: Path) -> None:
    put(store, 0)
    other = replace(KEY, fingerprint=replace(FINGERPRINT, weights="tuned", dtype="bfloat16"))
    expected = Miss("absent: the store holds chunks of another model, weights, dtype differ")
    assert store.get(other) == expected
    with DiskStore(folder) as again:
        assert again.get(other) == expected
        assert list(again.models().values()) == [FINGERPRINT.fields()]


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[1]", b"\xff"])
def test_an_unreadable_record_of_a_model_locks_nothing(folder: Path, content: bytes) -> None:
    with DiskStore(folder) as store:
        put(store, 0)
    [record] = (folder / "models").iterdir()
    record.write_bytes(content)
    with DiskStore(folder) as store:
        assert_same(store.get(KEY), example_chunk())
        put(store, 1)


def test_a_folder_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot open a store in"):
        DiskStore(tmp_path / "file")


def test_a_replaced_entry_is_there_once(store: DiskStore, folder: Path) -> None:
    put(store, 0)
    before = store.get(KEY)
    store.put(KEY, example_chunk(1, n_tokens=200))
    assert_same(store.get(KEY), example_chunk(1, n_tokens=200))
    assert_same(before, example_chunk())
    assert len(list(folder.rglob("*.kv"))) == 1
    assert store.stats()[0].size_bytes == taken(folder)


# Settings are kept with the store.


def test_settings_need_be_given_only_once(folder: Path) -> None:
    given = {"limit_bytes": 10 * ENTRY, "numbers": "int8", "eviction": "lru", "ttl_s": 60.0}
    with DiskStore(folder, **given):  # type: ignore[arg-type]
        pass
    with DiskStore(folder) as store:
        assert {name: getattr(store.settings, name) for name in given} == given
        assert store.numbers == "int8"
        assert store.stats()[0].limit_bytes == 10 * ENTRY
    with DiskStore(folder, eviction="lfu"):
        pass
    with DiskStore(folder) as store:
        assert {name: getattr(store.settings, name) for name in given} == {**given, "eviction": "lfu"}


def test_a_store_never_told_anything_has_defaults(store: DiskStore) -> None:
    about = store.settings
    assert (about.limit_bytes, about.numbers, about.eviction, about.ttl_s) == (64 << 30, "model", "cost", None)


def test_settings_that_a_later_version_has_are_passed_over(folder: Path) -> None:
    DiskStore(folder, limit_bytes=12345).close()
    kept = json.loads((folder / "store.json").read_text())
    assert "remote" not in kept, "so that earlier versions open it as well"
    (folder / "store.json").write_text(json.dumps({**kept, "colour": "green"}))
    with DiskStore(folder) as store:
        assert store.limit_bytes == 12345


@pytest.mark.parametrize("wrong", [{"numbers": "int4"}, {"eviction": "fifo"}], ids=str)
def test_settings_that_cannot_be_are_refused_and_not_kept(folder: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="there are"):
        DiskStore(folder, **wrong)  # type: ignore[arg-type]
    DiskStore(folder).close()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"numbers": "int4"}', '{"limit_bytes": "much"}', '{"ttl_s": "long"}', "\0"]
)
def test_unreadable_settings_are_one_clear_error(folder: Path, content: str) -> None:
    DiskStore(folder).close()
    (folder / "store.json").write_text(content)
    with pytest.raises(
        StoreError, match=r"cannot read .*store\.json .*; remove it and give the store's settings again"
    ):
        DiskStore(folder)


def test_entries_in_other_numbers_stay_as_they_are(folder: Path) -> None:
    with DiskStore(folder) as store:
        put(store, 0)
    with DiskStore(folder, numbers="int8") as store:
        put(store, 1)
        assert_same(store.get(KEY), example_chunk())
        assert [entry.numbers for entry in sorted(store.entries(), key=lambda e: e.used or 0.0)] == ["model", "int8"]


# Encryption.


@pytest.mark.parametrize(("first", "then"), [(Seal(SECRET), None), (None, Seal(SECRET))], ids=["lost", "surplus"])
def test_a_store_is_encrypted_or_it_is_not(folder: Path, first: Seal | None, then: Seal | None) -> None:
    with DiskStore(folder, seal=first) as store:
        put(store, 0)
    with pytest.raises(StoreError, match=rf"the store in {folder} .* encrypted and .* secret was given"):
        DiskStore(folder, seal=then)
    with DiskStore(folder, seal=first) as store:
        assert_same(store.get(KEY), example_chunk())


def test_nothing_of_a_text_is_in_the_files_of_an_encrypted_store(folder: Path) -> None:
    with DiskStore(folder, seal=Seal(SECRET)) as store:
        put(store, 0)
    telling = example_chunk().blocks["key.0"].numpy().tobytes()[:32]
    assert [
        p for p in folder.rglob("*") if p.is_file() and (telling in p.read_bytes() or SECRET in p.read_bytes())
    ] == []


def test_two_sealed_files_that_changed_places_are_refused(folder: Path) -> None:
    with DiskStore(folder, seal=Seal(SECRET)) as store:
        put(store, 0, 1)
        one, other = file_of(store, 0).read_bytes(), file_of(store, 1).read_bytes()
        file_of(store, 0).write_bytes(other)
        file_of(store, 1).write_bytes(one)
        assert [store.get(example_key(n)) for n in (0, 1)] == [Miss("entry of another chunk: ids differ")] * 2


# The limit.


@pytest.mark.parametrize("eviction", ["cost", "lru", "lfu"])
def test_the_limit_is_never_exceeded_not_even_while_writing(
    folder: Path, eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, most = 10 * ENTRY, 0
    with DiskStore(folder, limit, eviction=eviction) as store:
        write = store.files.write

        def watched(path: Path, parts: Sequence[bytes]) -> None:
            nonlocal most
            write(path, parts)
            most = max(most, taken(folder))

        monkeypatch.setattr(store.files, "write", watched)
        for number in range(50):
            tokens = 1 + (number * 97) % 400
            store.put(example_key(number % 30), example_chunk(number, n_tokens=tokens), saved_ms=float(tokens))
            assert taken(folder) == store.stats()[0].size_bytes <= limit
            assert_same(store.get(example_key(number % 30)), example_chunk(number, n_tokens=tokens))
        assert store.stats()[0].evicted > 0
    assert limit / 2 < most <= limit


def test_the_limit_holds_for_all_writers_together(folder: Path) -> None:
    limit, sizes = 4 * ENTRY, []

    def work(first: int) -> None:
        with DiskStore(folder, limit) as store:
            for number in range(first, first + 10):
                put(store, number)
                sizes.append(store.stats()[0].size_bytes)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 30
    assert max(sizes) <= limit
    assert taken(folder) <= limit


def test_an_entry_larger_than_the_limit_is_an_error_that_says_so(folder: Path) -> None:
    with DiskStore(folder, 2 * ENTRY) as store:
        put(store, 0)
        with pytest.raises(StoreError, match=rf"a chunk of [\d,]+ bytes does not fit a store of {2 * ENTRY:,} bytes$"):
            store.put(example_key(1), example_chunk(1, n_tokens=500))
        assert_same(store.get(KEY), example_chunk())


def test_a_limit_that_was_lowered_holds_from_the_next_entry_on(folder: Path) -> None:
    with DiskStore(folder, 10 * ENTRY) as store:
        put(store, *range(8))
    with DiskStore(folder, 3 * ENTRY) as store:
        put(store, 8)
        assert taken(folder) == store.stats()[0].size_bytes == 3 * ENTRY


def test_what_is_pinned_is_not_evicted(folder: Path) -> None:
    with DiskStore(folder, 3 * ENTRY, eviction="lru") as store:
        put(store, 0)
        assert store.pin(KEY)
        put(store, *range(1, 8))
        assert_same(store.get(KEY), example_chunk())
        assert [entry.address for entry in store.entries() if entry.pinned] == [KEY.address]
        store.pin(KEY, pinned=False)
        put(store, *range(8, 12))
        assert KEY not in store


def test_what_is_pinned_stays_so_when_replaced_and_after_a_restart(folder: Path) -> None:
    with DiskStore(folder) as store:
        put(store, 0)
        store.pin(KEY)
        put(store, 0)
        assert [entry.pinned for entry in store.entries()] == [True]
    with DiskStore(folder) as store:
        assert [entry.pinned for entry in store.entries()] == [True]


def test_if_everything_is_pinned_there_is_no_room_and_the_error_says_why(folder: Path) -> None:
    with DiskStore(folder, 2 * ENTRY) as store:
        for number in range(2):
            put(store, number)
            store.pin(example_key(number))
        with pytest.raises(StoreError, match=f"does not fit .* of which {2 * ENTRY:,} are pinned and 0 being written"):
            put(store, 2)
        assert present(store, 3) == [True, True, False]


def test_a_chunk_in_use_survives_its_eviction(folder: Path) -> None:
    with DiskStore(folder, 2 * ENTRY, eviction="lru") as store:
        put(store, 0)
        found = store.get(KEY)
        put(store, *range(1, 8))
        assert KEY not in store
        assert_same(found, example_chunk())


def test_uses_count_over_a_restart(folder: Path) -> None:
    with DiskStore(folder, 2 * ENTRY, eviction="lfu") as store:
        put(store, 0, 1)
        store.get(KEY)
    with DiskStore(folder) as store:
        put(store, 2)
        assert present(store, 3) == [True, False, True]


def test_the_small_and_dear_is_kept_before_the_large_and_cheap(folder: Path) -> None:
    with DiskStore(folder, 4 * ENTRY) as store:
        put(store, 0, saved_ms=5000.0)
        store.put(example_key(1), example_chunk(1, n_tokens=200), saved_ms=10.0)
        put(store, 2, saved_ms=20.0)
        assert present(store, 3) == [True, False, True]


def test_a_writer_waits_for_room_that_another_has_set_aside(folder: Path) -> None:
    with DiskStore(folder, 2 * ENTRY) as store:
        reserved = store.room.reserve(example_key(1).address, 2 * ENTRY)
        writer = threading.Thread(target=put, args=(store, 0))
        writer.start()
        writer.join(0.1)
        assert writer.is_alive()
        store.room.release(reserved)
        writer.join(20.0)
        assert_same(store.get(KEY), example_chunk())


def test_an_entry_that_can_never_fit_does_not_wait_for_others(folder: Path) -> None:
    with DiskStore(folder, 2 * ENTRY) as store:
        store.room.reserve(example_key(1).address, ENTRY)
        started = time.monotonic()
        with pytest.raises(StoreError, match=f"of which 0 are pinned and {ENTRY:,} being written"):
            store.put(KEY, example_chunk(n_tokens=500))
        assert time.monotonic() - started < 10.0


# Time.


def test_an_entry_is_gone_when_its_time_is_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(folder, ttl_s=60.0) as store:
        put(store, 0)
        assert_same(store.get(KEY), example_chunk())
        later(monkeypatch, 61.0)
        assert store.get(KEY) == Miss("expired")
        assert (KEY in store, taken(folder), store.stats()[0].size_bytes) == (False, 0, 0)


def test_what_has_expired_makes_room_before_anything_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(folder, 3 * ENTRY) as store:
        store.put(KEY, example_chunk().until(time.time() + 60.0), saved_ms=1e6)
        store.pin(KEY)
        put(store, 1, 2)
        later(monkeypatch, 61.0)
        put(store, 3)
        assert present(store, 4) == [False, True, True, True]


def test_an_expiry_of_its_own_counts_before_the_stores(folder: Path) -> None:
    with DiskStore(folder, ttl_s=60.0) as store:
        store.put(KEY, example_chunk().until(4e9))
        assert [round(entry.expires or 0.0) for entry in store.entries()] == [4_000_000_000]


# Writers that die.


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Callable[[DiskStore], None]:
    """Let what a store writes from now on be written by a process that is gone."""
    process = subprocess.Popen(["true"])
    process.wait()

    def die(store: DiskStore) -> None:
        name = f"{place()}-{process.pid}-0123456789abcdef.part"
        monkeypatch.setattr(store.files, "new_temporary", lambda: store.files.tmp / name)

    return die


def test_room_set_aside_by_a_dead_writer_is_taken_back(folder: Path, dead: Callable[[DiskStore], None]) -> None:
    with DiskStore(folder) as store:
        dead(store)
        reserved = store.room.reserve(example_key(1).address, 3 * ENTRY)
        reserved.temporary.write_bytes(b"half an entry")
    with DiskStore(folder, 3 * ENTRY) as store:
        assert store.stats()[0].size_bytes == 3 * ENTRY
        put(store, 0)
        assert store.stats()[0].size_bytes == taken(folder) == ENTRY
        assert list(store.files.tmp.iterdir()) == []


def test_room_set_aside_by_a_living_writer_is_not(folder: Path) -> None:
    with DiskStore(folder, 3 * ENTRY) as store:
        reserved = store.room.reserve(example_key(1).address, ENTRY)
        reserved.temporary.write_bytes(b"half an entry")
        put(store, 0, 2, 3)
        assert store.stats()[0].size_bytes == 3 * ENTRY
        assert reserved.temporary.exists()


def test_room_set_aside_too_long_ago_is_taken_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(folder, 3 * ENTRY) as store:
        reserved = store.room.reserve(example_key(1).address, 3 * ENTRY)
        later(monkeypatch, 3600.0)
        put(store, 0)
        with pytest.raises(OSError, match="No such file"):
            store.room.publish(reserved, "model", 1.0, None)
        assert store.stats()[0].size_bytes == taken(folder) == ENTRY


def test_an_entry_whose_writer_died_before_it_was_indexed_is_taken_up(
    folder: Path, dead: Callable[[DiskStore], None]
) -> None:
    with DiskStore(folder) as store:
        put(store, 1)
        dead(store)
        reserved = store.room.reserve(KEY.address, ENTRY)
        store.files.write(reserved.temporary, encode(KEY, example_chunk()))
        store.files.publish(reserved.temporary, KEY.address)
    with DiskStore(folder) as store:
        put(store, 2)
        assert {entry.address for entry in store.entries()} == {example_key(number).address for number in range(3)}
        assert store.stats()[0].size_bytes == taken(folder) == 3 * ENTRY


def test_so_is_one_that_replaced_a_smaller_one(folder: Path, dead: Callable[[DiskStore], None]) -> None:
    with DiskStore(folder) as store:
        put(store, 0)
        dead(store)
        larger = encode(KEY, example_chunk(n_tokens=300))
        reserved = store.room.reserve(KEY.address, sum(map(len, larger)))
        store.files.write(reserved.temporary, larger)
        store.files.publish(reserved.temporary, KEY.address)
    with DiskStore(folder) as store:
        put(store, 1)
        assert store.stats()[0].size_bytes == taken(folder) > 3 * ENTRY


# Damage.


def flip(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


DAMAGE = {
    "empty": (lambda data: b"", "truncated: 0 bytes"),
    "a few bytes": (lambda data: data[:10], "truncated: 10 bytes"),
    "half a header": (lambda data: data[:100], "truncated header"),
    "half": (lambda data: data[: len(data) // 2], rf"truncated: [\d,]+ bytes of {ENTRY:,}"),
    "one byte short": (lambda data: data[:-1], rf"truncated: {ENTRY - 1:,} bytes of {ENTRY:,}"),
    "one byte long": (lambda data: data + b"\0", rf"{ENTRY + 1:,} bytes of {ENTRY:,}"),
    "all zeros": (lambda data: bytes(len(data)), "not a stored chunk"),
    "another file": (lambda data: b"X" + data[1:], "not a stored chunk"),
    "another version": (lambda data: data[:8] + b"\x07" + data[9:], "format version 7, this library reads 2"),
    "flags": (lambda data: flip(data, 13), "damaged preamble"),
    "header": (lambda data: flip(data, 100), "header checksum differs"),
    "last block": (lambda data: flip(data, -1), r"checksum of block value\.2 differs"),
    "another's": (lambda data: b"".join(encode(example_key(7), example_chunk())), "another chunk: ids differ"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_a_miss_with_a_reason_goes_into_quarantine_and_heals(
    folder: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    with TieredStore(MemoryStore(), DiskStore(folder)) as store:
        disk = store.far
        put(disk, 0)
        damaged = damage(file_of(disk).read_bytes())
        file_of(disk).write_bytes(damaged)
        found = store.get(KEY)
        assert isinstance(found, Miss)
        assert re.search(reason, found.reason), found.reason
        assert KEY not in store

        [kept] = (folder / "quarantine").glob("*.kv")
        assert kept.read_bytes() == damaged
        assert json.loads(kept.with_suffix(".json").read_text()) == {"address": KEY.address, "reason": found.reason}
        stats = disk.stats()[0]
        assert (stats.entries, stats.size_bytes, stats.discarded) == (0, len(damaged), 1)

        put(disk, 0)
        assert_same(store.get(KEY), example_chunk())


def test_what_is_in_quarantine_counts_and_goes_before_anything_sound(folder: Path) -> None:
    with DiskStore(folder, 4 * ENTRY) as store:
        put(store, 0, 1, 2, saved_ms=1.0)
        for number in (0, 1):
            store.discard(example_key(number), "looks odd")
        assert store.stats()[0].size_bytes == taken(folder) == 3 * ENTRY
        put(store, 3, 4)
        assert len(list((folder / "quarantine").glob("*.kv"))) == len(list((folder / "quarantine").glob("*.json"))) == 1
        put(store, 5, 6)
        assert list((folder / "quarantine").iterdir()) == []
        assert sum(present(store, 7)) == 4
        assert taken(folder) == 4 * ENTRY


def test_a_file_that_vanished_is_a_miss_and_can_be_put_again(store: DiskStore) -> None:
    put(store, 0)
    file_of(store).unlink()
    assert store.get(KEY) == Miss("absent")
    assert KEY not in store
    put(store, 0)
    assert_same(store.get(KEY), example_chunk())


def test_a_disk_that_fails_on_opening_is_a_miss_and_nothing_is_removed(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error")

    put(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr("qcfuse_rag.store.disk.MappedFile", broken)
        assert store.get(KEY) == Miss("cannot be read: [Errno 5] Input/output error")
    assert_same(store.get(KEY), example_chunk())


def test_pages_that_cannot_be_read_are_an_error_and_not_a_signal(store: DiskStore) -> None:
    """What a disk error does to a mapped page, a file cut short does too."""
    store.put(KEY, example_chunk(n_tokens=300))
    chunk = store.get(KEY)
    assert not isinstance(chunk, Miss)
    chunk.layer(0)
    os.truncate(file_of(store), 3 * 4096)

    def read_on() -> None:
        with pytest.raises((OSError, CorruptEntry)):
            chunk.layer(2)

    assert in_a_child(read_on) == 0


def test_where_pages_cannot_be_asked_for_they_are_read(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on kernels before 5.14."""
    store.put(KEY, example_chunk(n_tokens=300))
    monkeypatch.setattr("qcfuse_rag.store.reader.MADV_POPULATE_READ", 12345)
    assert_same(store.get(KEY), example_chunk(n_tokens=300))
    found = store.get(KEY)
    assert not isinstance(found, Miss)
    file_of(store).unlink()
    with pytest.raises(OSError, match="No such file"):
        found.layer(0)


# Disks that are full.


def test_a_write_that_fails_leaves_nothing_behind_and_sets_nothing_aside(
    store: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    put(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"cannot write to .*No space left on device"):
            put(store, 1)
    assert list(store.files.tmp.iterdir()) == []
    assert store.stats()[0].size_bytes == taken(folder) == ENTRY
    assert present(store, 2) == [True, False]
    put(store, 1)


def test_an_index_that_fails_at_the_last_moment_undoes_the_entry(
    store: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the index does not know would not count towards the limit."""
    put(store, 0)
    index = store.room.index
    real = index.set

    def fail(name: str, record: object, tag: str, expires: float | None = None) -> None:
        if name == example_key(1).address:
            raise sqlite3.OperationalError("database or disk is full")
        real(name, record, tag, expires)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(index, "set", fail)
        with pytest.raises(StoreError, match="database or disk is full"):
            put(store, 1)
    assert present(store, 2) == [True, False]
    assert store.stats()[0].size_bytes == taken(folder) == ENTRY


def test_health_says_when_the_disk_has_less_room_than_was_promised(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(folder, 10 * ENTRY) as store:
        put(store, 0)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        [health] = store.health()
        assert (health.ok, health.problems) == (
            False,
            (f"may take {9 * ENTRY:,} bytes more, the disk has 1,000; lower the limit",),
        )


# The index: never needed to read, never believed, made again when it is gone.


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[bytes]:
    """Give a pickle that does harm when it is read; afterwards it must not have been."""
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (marker,))

    yield pickle.dumps(Bomb())
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert marker.exists(), "which it would have been"


def plant(folder: Path, change: str, bomb: bytes) -> None:
    """Change a row of a store's index as somebody would who can write to its folder."""
    (folder / "index" / "bomb.val").write_bytes(bomb)
    with sqlite3.connect(folder / "index" / "cache.db") as database:
        database.execute("DROP INDEX Cache_worth")
        one = "WHERE rowid = (SELECT MAX(rowid) FROM Cache)"
        database.execute(f"UPDATE Cache SET {change} {one}", {"bomb": bomb} if ":bomb" in change else {})
    database.close()


PLANTED = {
    "value": "value = :bomb",
    "value as its own kind": "value = :bomb, mode = 4",
    "value in a file": "value = :bomb, mode = 4, filename = 'bomb.val'",
    "value in a file alone": "filename = 'bomb.val'",
    "key": "key = :bomb",
    "key as its own kind": "key = :bomb, raw = 0",
    "kind": "mode = 4",
    "no kind": "mode = NULL",
    "no kind of key": "raw = NULL",
    "a record of nothing": "value = '{}'",
    "no record": "value = 'no JSON'",
}


@pytest.mark.parametrize("change", PLANTED.values(), ids=PLANTED)
def test_what_is_planted_in_the_index_is_not_executed_and_the_index_is_made_again(
    folder: Path, bomb: bytes, change: str
) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
    plant(folder, change, bomb)
    with DiskStore(folder, 10 * ENTRY) as store:
        assert "has been made again from the files" in store.notes[0]
        assert {entry.address for entry in store.entries()} == {example_key(number).address for number in (0, 1)}
        assert store.stats()[0].size_bytes == 2 * ENTRY
        assert_same(store.get(KEY), example_chunk())
        put(store, 2)
        assert store.health()[0].ok


def test_what_is_planted_while_the_store_is_open_is_an_error_and_not_executed(
    store: DiskStore, folder: Path, bomb: bytes
) -> None:
    put(store, 0)
    plant(folder, PLANTED["value as its own kind"], bomb)
    with pytest.raises(StoreError, match="the index holds a value that is not text; it was not read"):
        store.pin(KEY)
    assert_same(store.get(KEY), example_chunk())


@pytest.mark.parametrize(
    "junk", [b"this is no database" * 1000, b"SQLite format 3\0" + bytes(5000)], ids=["text", "zeros"]
)
def test_a_damaged_index_is_made_again_from_the_files(folder: Path, junk: bytes) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
    (folder / "index" / "cache.db").write_bytes(junk)
    with DiskStore(folder) as store:
        assert "has been made again from the files" in store.notes[0]
        assert {entry.address for entry in store.entries()} == {example_key(number).address for number in (0, 1)}
        put(store, 2)


def test_an_index_that_is_gone_is_made_again_from_the_files(folder: Path) -> None:
    with DiskStore(folder, 3 * ENTRY) as store:
        put(store, 0, 1)
        before = {(entry.address, entry.size_bytes, entry.numbers) for entry in store.entries()}
        store.discard(KEY, "looks odd")
        put(store, 0)
    shutil.rmtree(folder / "index")
    with DiskStore(folder) as store:
        assert {(entry.address, entry.size_bytes, entry.numbers) for entry in store.entries()} == before
        assert store.stats()[0].size_bytes == taken(folder) == 3 * ENTRY


def test_a_damaged_file_found_when_the_index_is_made_again_goes_into_quarantine(folder: Path) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
        file_of(store).write_bytes(b"damaged")
    shutil.rmtree(folder / "index")
    with DiskStore(folder) as store:
        assert present(store, 2) == [False, True]
        assert len(list((folder / "quarantine").glob("*.kv"))) == 1


@pytest.fixture
def unindexed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskStore]:
    """Give a store with one entry, the index of which cannot be opened."""

    def locked(place: Path) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    with DiskStore(folder) as store:
        put(store, 0)
    monkeypatch.setattr("qcfuse_rag.store.index.Index", locked)
    with DiskStore(folder) as store:
        yield store


def test_without_an_index_entries_are_read_all_the_same(unindexed: DiskStore) -> None:
    assert_same(unindexed.get(KEY), example_chunk())
    found = unindexed.open(KEY.address)
    assert not isinstance(found, Miss)
    assert_same(found[1], example_chunk())
    assert KEY in unindexed
    assert [(entry.address, entry.size_bytes, entry.uses) for entry in unindexed.entries()] == [
        (KEY.address, ENTRY, None)
    ]
    assert (unindexed.stats()[0].entries, unindexed.stats()[0].size_bytes, unindexed.stats()[0].hits) == (1, ENTRY, 1)


def test_without_an_index_nothing_is_written_and_the_errors_say_why(unindexed: DiskStore) -> None:
    reason = "its index cannot be opened: attempt to write a readonly database"
    acts: list[Callable[[], object]] = [lambda: put(unindexed, 1), lambda: unindexed.pin(KEY)]
    for act in acts:
        with pytest.raises(StoreError, match=reason):
            act()
    [health] = unindexed.health()
    assert (health.ok, health.problems) == (False, (reason,))
    assert not unindexed.discard(KEY)
    assert_same(unindexed.get(KEY), example_chunk())
    assert unindexed.clear() == 1
    assert KEY not in unindexed, "all of it can go, which needs none"


def test_an_index_that_fails_later_does_not_keep_entries_from_being_read(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    put(store, 0)
    monkeypatch.setattr(store.room.index, "transact", fail)
    for _ in range(100):
        assert not isinstance(store.get(KEY), Miss)
    with pytest.raises(StoreError, match="disk I/O error"):
        put(store, 1)
    assert not store.discard(KEY)
    monkeypatch.undo()
    assert torch.equal(store.get(KEY).blocks["key.0"], example_chunk().blocks["key.0"])  # type: ignore[union-attr]


# What belongs to somebody else.


def test_another_secret_is_refused_before_anything_is_read(folder: Path) -> None:
    with DiskStore(folder, seal=Seal(SECRET)) as store:
        store.put(KEY, example_chunk())
    with pytest.raises(StoreError, match="encrypted under another secret"):
        DiskStore(folder, seal=Seal(SECRET[::-1]))
    assert SECRET.hex() not in (folder / "store.json").read_text()
    with DiskStore(folder, seal=Seal(SECRET)) as store:
        assert_same(store.get(KEY), example_chunk())


def test_encrypted_entries_are_left_alone_by_those_without_the_secret(folder: Path) -> None:
    """Even when the settings that would have refused them are lost."""
    with DiskStore(folder, seal=Seal(SECRET)) as store:
        store.put(KEY, example_chunk())
    (folder / "store.json").unlink()
    with pytest.raises(StoreError, match=r"entries of the store in .* are encrypted and no secret was given"):
        DiskStore(folder)
    with DiskStore(folder, seal=Seal(SECRET)) as store:
        assert_same(store.get(KEY), example_chunk())


def test_plain_entries_are_not_joined_by_encrypted_ones(folder: Path) -> None:
    with DiskStore(folder) as store:
        store.put(KEY, example_chunk())
    (folder / "store.json").unlink()
    with pytest.raises(StoreError, match="are not encrypted and a secret was given"):
        DiskStore(folder, seal=Seal(SECRET))


def test_a_limit_that_is_lowered_holds_from_then_on(folder: Path) -> None:
    with DiskStore(folder) as store:
        for number in range(8):
            store.put(example_key(number), example_chunk(number))
        store.pin(example_key(3))
        taken = store.stats()[0].size_bytes
    with DiskStore(folder, taken // 2) as store:
        [now] = store.stats()
        assert now.size_bytes <= taken // 2
        assert now.entries == 4
        assert example_key(3) in store
        assert store.health()[0].ok
    with DiskStore(folder, taken // 16) as store:
        assert [entry.address for entry in store.entries()] == [example_key(3).address], "what is pinned stays"
        assert "more than its limit, pinned ones" in str(store.health()[0].problems)


@pytest.mark.parametrize("opened_before", [True, False])
def test_a_disk_that_is_too_full_for_an_index_can_be_cleared(
    folder: Path, opened_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(folder) as store:
        for number in range(3):
            store.put(example_key(number), example_chunk(number))

    def full(*_: object, **__: object) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        if not opened_before:
            patch.setattr("qcfuse_rag.store.disk.open_index", lambda folder: (None, None, "database or disk is full"))
        store = DiskStore(folder)
        patch.setattr(Room, "remove", full)
        assert store.clear() == 3
        store.close()
    with DiskStore(folder) as store:
        assert store.stats()[0].size_bytes == 0


def test_a_writer_in_another_container_is_not_taken_for_dead(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same name, over the same folder, with process numbers of its own."""
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid = int(gone.stdout)
    assert store.files.is_abandoned(f"{place()}-{pid}-0123456789abcdef.part")
    assert not store.files.is_abandoned(f"{place()}0-{pid}-0123456789abcdef.part")
    assert not store.files.is_abandoned(f"{place()}-{os.getpid()}-0123456789abcdef.part")


def test_an_expired_entry_is_not_there(folder: Path) -> None:
    with DiskStore(folder, ttl_s=60.0) as store:
        store.put(KEY, example_chunk().until(1.0))
        assert KEY not in store


def test_what_is_no_address_leads_nowhere(folder: Path) -> None:
    (folder.parent / "secret.kv").write_text("not ours")
    with DiskStore(folder) as store:
        for act in (store.discard, lambda name: name in store):
            with pytest.raises(ValueError, match="not an address"):
                act("../../../secret")
        assert store.open("../../../secret") == Miss("cannot be read: not an address: '../../../secret'")
    assert (folder.parent / "secret.kv").exists()


@pytest.mark.parametrize("given", [{"limit_bytes": 0}, {"limit_bytes": -1}, {"ttl_s": 0.0}])
def test_settings_that_cannot_be_are_refused(folder: Path, given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be more than 0"):
        DiskStore(folder, **given)  # type: ignore[arg-type]
