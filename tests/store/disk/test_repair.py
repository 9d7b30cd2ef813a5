"""Maintenance of a store on disk: check, garbage collection, rebuilding the index."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.admin import CheckReport, collect_garbage, fsck, rebuild
from qcfuse_rag.store.backends import index
from qcfuse_rag.store.backends.files import process_namespace
from qcfuse_rag.store.entry.codec import MappedFile
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.support import seams

KEY = example_key()


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    """Give a store of three entries."""
    with DiskStore(folder) as store:
        for number in range(3):
            store.put(example_key(number), example_chunk(number))
        yield store


@pytest.fixture
def gone() -> int:
    """Give the id of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def file_of(store: DiskStore, number: int = 0) -> Path:
    return store.files.path(example_key(number).address)


def addresses(store: DiskStore) -> set[str]:
    return {entry.address for entry in store.entries()}


def temporary(store: DiskStore, pid: int | str, host: str = process_namespace()) -> Path:
    path = store.files.tmp / f"{host}-{pid}-0123456789abcdef.part"
    path.write_bytes(b"half an entry")
    return path


# fsck.


def test_a_sound_store_is_clean(store: DiskStore) -> None:
    report = fsck(store)
    assert report == CheckReport(checked=3, sound=3)
    assert report.clean
    assert json.loads(json.dumps(report.to_dict()))["clean"] is True


@pytest.mark.parametrize(
    ("position", "reason"), [(-1, "checksum of block value.2 differs"), (100, "header checksum differs")]
)
def test_damage_is_found_and_goes_into_quarantine(store: DiskStore, position: int, reason: str) -> None:
    data = bytearray(file_of(store).read_bytes())
    data[position] ^= 1
    file_of(store).write_bytes(data)
    report = fsck(store)
    assert (report.checked, report.sound, report.damaged) == (3, 2, [(KEY.address, reason)])
    assert not report.clean
    assert addresses(store) == {example_key(number).address for number in (1, 2)}
    assert len(list(store.files.quarantined.glob("*.kv"))) == 1
    assert fsck(store).clean


def test_files_the_index_does_not_know_are_taken_up(store: DiskStore) -> None:
    before = store.stats()
    for number in (0, 1):
        store.quota.index.delete(example_key(number).address)
    report = fsck(store)
    assert (report.found, report.checked, report.sound) == (2, 3, 3)
    assert store.stats() == before


def test_a_file_the_index_does_not_know_and_that_is_damaged_is_not(store: DiskStore) -> None:
    stray = store.files.path("ab" * 16)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"damaged")
    report = fsck(store)
    assert (report.found, report.checked, report.sound) == (0, 3, 3)
    assert report.damaged == [("ab" * 16, "truncated: 7 bytes")]
    assert not report.clean
    assert not stray.exists()
    assert store.stats()[0].size_bytes == sum(path.stat().st_size for path in store.folder.rglob("*.kv"))


def test_a_file_the_index_does_not_know_and_that_cannot_be_read_counts_and_stops_nothing(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, **options: object) -> MappedFile:
        if path == file_of(store):
            raise OSError(5, "Input/output error")
        return MappedFile(path, **options)  # type: ignore[arg-type]

    before = store.stats()[0].size_bytes
    store.quota.index.delete(KEY.address)
    with monkeypatch.context() as patch:
        seams.mapped_file(patch, broken)
        patch.setattr(index, "MappedFile", broken)
        report = fsck(store)
    assert report.unread == [(KEY.address, "cannot be read: [Errno 5] Input/output error")]
    assert (report.checked, report.sound, report.damaged) == (3, 2, [])
    assert store.stats()[0].size_bytes == before
    assert fsck(store).clean


def test_rows_whose_files_are_gone_are_removed_and_their_bytes_taken_back(store: DiskStore) -> None:
    before = store.stats()[0].size_bytes
    size = file_of(store).stat().st_size
    file_of(store).unlink()
    report = fsck(store)
    assert (report.lost, report.checked, report.reclaimed_bytes) == (1, 2, size)
    assert store.stats()[0].size_bytes == before - size


def test_what_a_dead_writer_left_is_removed(store: DiskStore, gone: int) -> None:
    left = temporary(store, gone)
    assert fsck(store).leftovers == 1
    assert not left.exists()
    assert fsck(store).clean


def test_what_a_living_writer_is_writing_is_left_alone(store: DiskStore) -> None:
    reserved = store.quota.reserve(example_key(9).address, 1000)
    reserved.temporary.write_bytes(b"half an entry")
    writing = [reserved.temporary, temporary(store, os.getpid())]
    assert fsck(store).clean
    assert all(path.exists() for path in writing)
    assert store.quota.index.size_of("writing") == 1000


def test_files_of_other_machines_or_other_programs_are_not_touched(store: DiskStore, gone: int) -> None:
    strange = [temporary(store, gone, host="elsewhere"), temporary(store, "x"), store.files.tmp / ".nfs0001"]
    strange[2].write_bytes(b"")
    assert fsck(store).clean
    assert all(path.exists() for path in strange)


def test_what_the_store_did_not_write_is_named_and_left_alone(store: DiskStore) -> None:
    stray = file_of(store).with_name(f"{KEY.address} (copy).kv")
    stray.write_bytes(file_of(store).read_bytes())
    report = fsck(store)
    assert (report.strays, report.sound, report.clean) == ([str(stray.relative_to(store.folder))], 3, True)
    assert rebuild(store) == 3
    assert store.clear() == 3
    assert stray.exists()


def test_what_has_expired_is_removed(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = time.time() + 60.0
    store.put(example_key(7), example_chunk().with_expiry(soon))
    monkeypatch.setattr(time, "time", lambda: soon + 1.0)
    report = fsck(store)
    assert (report.checked, report.sound) == (3, 3)
    assert report.reclaimed_bytes > 0
    assert example_key(7) not in store


def test_a_store_that_cannot_be_written_cannot_be_maintained(
    store: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(process_namespace: Path) -> None:
        raise OSError(30, "Read-only file system")

    seams.disk_index(monkeypatch, locked)
    with DiskStore(folder) as read_only:
        for act in (fsck, collect_garbage, rebuild):
            with pytest.raises(StoreError, match=r"its index cannot be opened: .*Read-only file system"):
                act(read_only)  # type: ignore[operator]


# Garbage.


def test_garbage_is_collected(store: DiskStore, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.stats()[0].size_bytes
    size = file_of(store).stat().st_size
    soon = time.time() + 60.0
    store.put(KEY, example_chunk().with_expiry(soon))
    store.discard(example_key(1), "looks odd")
    left = temporary(store, gone)
    monkeypatch.setattr(time, "time", lambda: soon + 1.0)
    assert collect_garbage(store) == 2 * size
    assert store.stats()[0].size_bytes == before - 2 * size
    assert addresses(store) == {example_key(2).address}
    assert list(store.files.quarantined.iterdir()) == []
    assert not left.exists()
    assert collect_garbage(store) == 0


# The index.


def test_the_index_can_be_rebuilt_while_the_store_is_open(store: DiskStore) -> None:
    before = addresses(store), store.stats()[0].size_bytes
    store.pin(KEY)
    assert rebuild(store) == 3
    assert (addresses(store), store.stats()[0].size_bytes) == before
    assert not any(entry.pinned for entry in store.entries()), "uses and pins are lost"
    assert fsck(store).clean


def test_what_is_in_quarantine_still_counts_after_the_index_was_made_again(store: DiskStore) -> None:
    before = store.stats()[0].size_bytes
    store.discard(KEY, "looks odd")
    assert rebuild(store) == 2
    assert store.stats()[0].size_bytes == before


# Another secret.


def test_an_entry_under_another_secret_is_reported_and_left_alone(tmp_path: Path) -> None:
    secret = bytes(range(32))
    first, other = (
        DiskStore(tmp_path / name, cipher=StoreCipher(key)) for name, key in (("a", secret), ("b", secret[::-1]))
    )
    with first, other:
        for number in (0, 1):
            first.put(example_key(number), example_chunk(number))
        other.put(KEY, example_chunk())
        ours, theirs = (store.files.path(KEY.address) for store in (first, other))
        ours.write_bytes(theirs.read_bytes())
        for _ in range(2):
            report = fsck(first)
            reason = "cannot be decrypted: changed, or written under another secret"
            assert (report.unread, report.damaged, report.sound) == ([(KEY.address, reason)], [], 1)
            assert not report.clean
            assert ours.exists()
