"""Damage to a store on disk is a miss with a reason."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, MemoryStore, TieredStore
from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import ENTRY, KEY, file_of, in_a_child, present, put, taken
from tests.store.entry.entries import header_of, with_header
from tests.support import seams


def flip(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


def in_a_format_of_before(data: bytes) -> bytes:
    return with_header(data, json.dumps({**header_of(data), "numbers": "fp8"}).encode())


DAMAGE = {
    "empty": (lambda data: b"", "truncated: 0 bytes"),
    "a few bytes": (lambda data: data[:10], "truncated: 10 bytes"),
    "half a header": (lambda data: data[:100], "truncated header"),
    "half": (lambda data: data[: len(data) // 2], rf"truncated: [\d,]+ bytes of {ENTRY:,}"),
    "another file": (lambda data: b"X" + data[1:], "not a stored chunk"),
    "another version": (lambda data: data[:8] + b"\x07" + data[9:], "format version 7, this library reads 2"),
    "flags": (lambda data: flip(data, 13), "damaged preamble"),
    "header": (lambda data: flip(data, 100), "header checksum differs"),
    "last block": (lambda data: flip(data, -1), r"checksum of block value\.2 differs"),
    "a format of before": (in_a_format_of_before, "invalid kv_dtype 'fp8'"),
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


def test_what_is_removed_is_gone_from_quarantine_too(store: DiskStore, folder: Path) -> None:
    put(store, 0, 1)
    for number in (0, 1):
        store.discard(example_key(number), "looks odd")
    assert not store.discard(KEY), "an entry it was not any more"
    assert {path.stem for path in (folder / "quarantine").iterdir()} == {example_key(1).address}
    assert store.stats()[0].size_bytes == taken(folder) == ENTRY


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
        seams.mapped_file(patch, broken)
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
    monkeypatch.setattr("qcfuse_rag.store.entry.codec.MADV_POPULATE_READ", 12345)
    assert_same(store.get(KEY), example_chunk(n_tokens=300))
    found = store.get(KEY)
    assert not isinstance(found, Miss)
    file_of(store).unlink()
    with pytest.raises(OSError, match="No such file"):
        found.layer(0)
