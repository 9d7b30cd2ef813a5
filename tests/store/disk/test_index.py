"""The index of a store on disk: not needed for reading, never trusted, rebuilt when it is gone."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.admin import rebuild
from qcfuse_rag.store.backends.base import Health, Miss
from qcfuse_rag.store.backends.index import Index, inode, open_index
from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import ENTRY, KEY, in_a_child, put, taken
from tests.support import seams


@pytest.mark.parametrize("change", ["value = X'80', mode = 4", "key = X'80', raw = 0", "value = 'no JSON'"])
def test_a_row_that_makes_no_sense_is_not_unpickled_and_the_index_is_rebuilt_in_use(folder: Path, change: str) -> None:
    with DiskStore(folder, 10 * ENTRY) as store:
        put(store, 0, 1)
        with sqlite3.connect(folder / "index" / "cache.db") as database:
            database.execute("DROP INDEX Cache_worth")
            database.execute(f"UPDATE Cache SET {change} WHERE rowid = (SELECT MAX(rowid) FROM Cache)")
        database.close()
        assert {entry.address for entry in store.entries()} == {example_key(number).address for number in (0, 1)}
        assert "has been rebuilt from the files" in store.notes[0]
        assert store.stats()[0].size_bytes == 2 * ENTRY
        assert_same(store.get(KEY), example_chunk())
        put(store, 2)
        assert store.health()[0].ok


def test_an_index_in_which_others_write_while_it_is_opened_is_sound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(folder, 10 * ENTRY) as store:
        assert store.quota is not None
        writer, rows = store.quota.index, Index._rows

        def rows_between_writes(index: Index, statement: str, *values: Any) -> list[Any]:
            found = rows(index, statement, *values)
            if index is not writer:
                put(store, len(list(store.entries())))
            return found

        monkeypatch.setattr(Index, "_rows", rows_between_writes)
        number = inode(folder / "index")
        with DiskStore(folder) as another:
            assert (another.notes, inode(folder / "index")) == ([], number)
        monkeypatch.undo()
        assert len(list(store.entries())) > 1


@pytest.mark.parametrize("expires", [None, 1.0])
def test_a_row_that_names_a_file_has_no_file_removed(folder: Path, tmp_path: Path, expires: float | None) -> None:
    """diskcache keeps large values in files, and removes a row's file when the row is replaced."""
    victim = tmp_path / "victim"
    victim.write_text("of somebody else")
    with DiskStore(folder, 10 * ENTRY) as store:
        put(store, 0)
        with sqlite3.connect(folder / "index" / "cache.db") as database:
            database.execute("UPDATE Cache SET filename = ?, expire_time = ?", (str(victim), expires))
        database.close()
        put(store, 0, 1)
        assert store.discard(example_key(0))
    assert victim.exists()


def test_a_damaged_or_missing_index_is_rebuilt_from_the_files(folder: Path) -> None:
    with DiskStore(folder, 3 * ENTRY) as store:
        put(store, 0, 1)
        before = {(entry.address, entry.size_bytes, entry.kv_dtype) for entry in store.entries()}
        store.discard(KEY, "looks odd")
        put(store, 0)
    for junk in (b"this is no database" * 1000, b"SQLite format 3\0" + bytes(5000), None):
        shutil.rmtree(folder / "index")
        if junk is not None:
            (folder / "index").mkdir()
            (folder / "index" / "cache.db").write_bytes(junk)
        with DiskStore(folder) as store:
            assert ["has been rebuilt from the files" in note for note in store.notes] == [True] * (junk is not None)
            assert {(entry.address, entry.size_bytes, entry.kv_dtype) for entry in store.entries()} == before
            assert store.stats()[0].size_bytes == taken(folder) == 3 * ENTRY


def test_an_index_that_another_process_has_rebuilt_meanwhile_stays(folder: Path) -> None:
    with DiskStore(folder, 3 * ENTRY) as store:
        put(store, 0, 1)
    index, found_damaged = folder / "index", inode(folder / "index")
    opened, repaired = open_index(index, found_damaged)
    opened.close()
    assert repaired is not None
    rebuilt = inode(index)
    opened, repaired = open_index(index, found_damaged if rebuilt != found_damaged else -1)
    opened.close()
    assert (repaired, inode(index)) == (None, rebuilt)


@pytest.mark.parametrize("name", ["x${QCFUSE_ELSEWHERE}", "~", "100%?a#b"])
def test_the_index_lies_in_the_folder_whatever_its_name_means_to_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("QCFUSE_ELSEWHERE", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    with DiskStore(tmp_path / "stores" / name) as store:
        put(store, 0)
    assert (tmp_path / "stores" / name / "index" / "cache.db").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["stores"]


def test_without_an_index_entries_are_read_and_the_errors_say_why_nothing_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(place: Path) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    with DiskStore(folder) as store:
        put(store, 0)
    seams.disk_index(monkeypatch, locked)
    with DiskStore(folder) as store:
        assert_same(store.get(KEY), example_chunk())
        assert not isinstance(store.open(KEY.address), Miss)
        assert [(entry.address, entry.size_bytes, entry.uses) for entry in store.entries()] == [
            (KEY.address, ENTRY, None)
        ]
        assert (store.stats()[0].entries, store.stats()[0].size_bytes, store.stats()[0].hits) == (1, ENTRY, 1)
        reason = "its index cannot be opened: attempt to write a readonly database"
        for act in (lambda: put(store, 1), lambda: store.pin(KEY)):
            with pytest.raises(StoreError, match=reason):
                act()
        assert store.health() == [Health("disk", ok=False, problems=(reason,))]
        assert not store.discard(KEY)
        assert KEY in store
        assert store.clear() == 1
        assert KEY not in store, "all of it can go, which needs none"


def test_an_index_that_fails_later_does_not_keep_entries_from_being_read(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    put(store, 0)
    monkeypatch.setattr(store.quota.index, "transact", fail)
    for _ in range(100):
        assert not isinstance(store.get(KEY), Miss)
    with pytest.raises(StoreError, match="disk I/O error"):
        put(store, 1)
    assert not store.discard(KEY)
    monkeypatch.undo()
    assert torch.equal(store.get(KEY).blocks["key.0"], example_chunk().blocks["key.0"])  # type: ignore[union-attr]


def test_two_stores_go_on_with_one_index_after_it_was_deleted_and_keep_reservations(folder: Path) -> None:
    def check_agrees(store: DiskStore) -> None:
        assert store.stats()[0].size_bytes == taken(folder) <= 6 * ENTRY
        assert {entry.address for entry in store.entries()} == {address for address, _ in store.files.entries()}

    with DiskStore(folder, 6 * ENTRY) as first, DiskStore(folder) as second:
        put(first, 0, 1, 2)
        put(second, 3, 4)
        reserved = first.quota.reserve(example_key(100).address, ENTRY)
        shutil.rmtree(folder / "index")
        for number in range(6, 16):
            put((second, first)[number % 2], number)
            assert taken(folder) <= 6 * ENTRY
        reserved.temporary.write_bytes(b"".join(encode(example_key(100), example_chunk())))
        first.change(lambda quota: quota.publish(reserved, "model", 1.0, None))
        for store in (first, second):
            check_agrees(store)


@pytest.mark.parametrize("dies", [False, True])
def test_rebuilding_keeps_the_reservations_of_living_writers_only(folder: Path, dies: bool) -> None:
    with DiskStore(folder, 6 * ENTRY) as store:
        put(store, 0)

        def reserve() -> None:
            with DiskStore(folder) as writer:
                writer.quota.reserve(example_key(100).address, 2 * ENTRY)

        assert in_a_child(reserve) == 0 if dies else not reserve()
        assert rebuild(store) == 1
        assert store.quota.index.size() == (1 if dies else 3) * ENTRY
