"""Maintenance of a store on disk: check, garbage collection, rebuilding the index."""

from __future__ import annotations

import os
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
from tests.store.disk.folders import ENTRY, KEY, SECRET, file_of, later, present, put, taken
from tests.support import seams


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    """Give a store of three entries."""
    with DiskStore(folder) as store:
        put(store, 0, 1, 2)
        yield store


def temporary(store: DiskStore, pid: int | str, host: str = process_namespace()) -> Path:
    path = store.files.tmp / f"{host}-{pid}-0123456789abcdef.part"
    path.write_bytes(b"half an entry")
    return path


# fsck.


def test_a_sound_store_is_clean(store: DiskStore) -> None:
    report = fsck(store)
    assert report == CheckReport(checked=3, sound=3)
    assert report.clean


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
    assert present(store, 3) == [False, True, True]
    assert len(list(store.files.quarantined.glob("*.kv"))) == 1
    assert fsck(store).clean


def test_writers_do_not_wait_while_files_are_listed_and_compared(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their changes are no errors and stay; real errors are mended."""
    store.quota.index.delete(example_key(0).address)
    file_of(store, 1).unlink()
    file_size, entries = index.file_size, store.files.entries

    def size_while_others_write(path: Path) -> int | None:
        monkeypatch.setattr(index, "file_size", file_size)
        put(other, 3)
        other.discard(example_key(2))
        return file_size(path)

    def list_while_others_write() -> list[tuple[str, Path]]:
        monkeypatch.setattr(store.files, "entries", entries)
        put(other, 4, 5)
        listed = list(entries())
        other.discard(example_key(5))
        return listed

    monkeypatch.setattr(index, "file_size", size_while_others_write)
    monkeypatch.setattr(store.files, "entries", list_while_others_write)
    with DiskStore(store.folder) as other:
        report = fsck(store)
    assert (report.found, report.lost, report.damaged) == (1, 1, [])
    assert present(store, 6) == [True, False, False, True, True, False]
    assert fsck(store) == CheckReport(checked=3, sound=3)


def test_files_the_index_does_not_know_are_taken_up_unless_they_are_damaged(store: DiskStore) -> None:
    before = store.stats()
    for number in (0, 1):
        store.quota.index.delete(example_key(number).address)
    stray = store.files.path("ab" * 16)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"damaged")
    report = fsck(store)
    assert (report.found, report.checked, report.sound) == (2, 3, 3)
    assert report.damaged == [("ab" * 16, "truncated: 7 bytes")]
    assert not stray.exists()
    assert store.stats()[0].size_bytes == before[0].size_bytes + 7 == taken(store.folder)


def test_a_file_the_index_does_not_know_and_that_cannot_be_read_counts_and_stops_nothing(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, **options: object) -> MappedFile:
        if path == file_of(store):
            raise OSError(5, "Input/output error")
        return MappedFile(path, **options)  # type: ignore[arg-type]

    store.quota.index.delete(KEY.address)
    with monkeypatch.context() as patch:
        seams.mapped_file(patch, broken)
        patch.setattr(index, "MappedFile", broken)
        report = fsck(store)
    assert report.unread == [(KEY.address, "cannot be read: [Errno 5] Input/output error")]
    assert (report.checked, report.sound, report.damaged) == (3, 2, [])
    assert store.stats()[0].size_bytes == 3 * ENTRY
    assert fsck(store).clean


def test_rows_whose_files_are_gone_are_removed_and_their_bytes_taken_back(store: DiskStore) -> None:
    file_of(store).unlink()
    report = fsck(store)
    assert (report.lost, report.checked, report.reclaimed_bytes) == (1, 2, ENTRY)
    assert store.stats()[0].size_bytes == 2 * ENTRY


def test_what_a_dead_writer_of_this_machine_left_is_removed_and_nothing_else(store: DiskStore, gone: int) -> None:
    reserved = store.quota.reserve(example_key(9).address, 1000)
    reserved.temporary.write_bytes(b"half an entry")
    kept = [reserved.temporary, temporary(store, os.getpid()), temporary(store, gone, host="elsewhere")]
    kept += [temporary(store, "x"), store.files.tmp / ".nfs0001"]
    kept[-1].touch()
    left = temporary(store, gone)
    assert fsck(store).leftovers == 1
    assert not left.exists()
    assert fsck(store).clean
    assert all(path.exists() for path in kept)
    assert store.quota.index.size_of("writing") == 1000


def test_what_the_store_did_not_write_is_named_and_left_alone(store: DiskStore) -> None:
    stray = file_of(store).with_name(f"{KEY.address} (copy).kv")
    stray.write_bytes(file_of(store).read_bytes())
    report = fsck(store)
    assert (report.strays, report.sound, report.clean) == ([str(stray.relative_to(store.folder))], 3, True)
    assert rebuild(store) == 3
    assert store.clear() == 3
    assert stray.exists()


def test_an_entry_under_another_secret_is_reported_and_left_alone(tmp_path: Path) -> None:
    ciphers = {"a": StoreCipher(SECRET), "b": StoreCipher(SECRET[::-1])}
    first, other = (DiskStore(tmp_path / name, cipher=cipher) for name, cipher in ciphers.items())
    with first, other:
        put(first, 0, 1)
        put(other, 0)
        file_of(first).write_bytes(file_of(other).read_bytes())
        for _ in range(2):
            report = fsck(first)
            reason = "cannot be decrypted: changed, or written under another secret"
            assert (report.unread, report.damaged, report.sound) == ([(KEY.address, reason)], [], 1)
            assert not report.clean
            assert file_of(first).exists()


def test_a_store_that_cannot_be_written_cannot_be_maintained(
    store: DiskStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(folder: Path) -> None:
        raise OSError(30, "Read-only file system")

    seams.disk_index(monkeypatch, locked)
    with DiskStore(folder) as read_only:
        for act in (fsck, collect_garbage, rebuild):
            with pytest.raises(StoreError, match=r"its index cannot be opened: .*Read-only file system"):
                act(read_only)  # type: ignore[operator]


# Garbage, and the index.


@pytest.mark.parametrize("clean", [fsck, collect_garbage])
def test_what_has_expired_and_what_the_dead_left_goes_and_quarantine_is_emptied_by_gc(
    store: DiskStore, gone: int, monkeypatch: pytest.MonkeyPatch, clean: object
) -> None:
    store.put(KEY, example_chunk().with_expiry(time.time() + 60.0))
    store.discard(example_key(1), "looks odd")
    left = temporary(store, gone)
    later(monkeypatch, 61.0)
    if clean is collect_garbage:
        assert (collect_garbage(store), collect_garbage(store)) == (2 * ENTRY, 0)
        assert list(store.files.quarantined.iterdir()) == []
    else:
        assert fsck(store).reclaimed_bytes == ENTRY
    assert present(store, 3) == [False, False, True]
    assert store.stats()[0].size_bytes == taken(store.folder)
    assert not left.exists()


def test_the_index_can_be_rebuilt_while_the_store_is_open(store: DiskStore) -> None:
    """With what is in quarantine; uses and pins are lost."""
    store.discard(example_key(2), "looks odd")
    store.pin(KEY)
    assert rebuild(store) == 2
    assert present(store, 3) == [True, True, False]
    assert store.stats()[0].size_bytes == 3 * ENTRY
    assert not any(entry.pinned for entry in store.entries())
    assert fsck(store).clean
