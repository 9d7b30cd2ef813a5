"""The index of a store on disk: not needed for reading, never trusted, rebuilt when it is gone."""

from __future__ import annotations

import pickle
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.eviction import EntryUsage
from qcfuse_rag.store.backends.index_database import ENTRY as ENTRY_TAG
from qcfuse_rag.store.backends.index_database import PINNED, QUARANTINE, WRITING, Record
from qcfuse_rag.store.maintenance import collect_garbage, rebuild
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import ENTRY, KEY, file_of, present, put, taken
from tests.support import seams


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
        last_row = "WHERE rowid = (SELECT MAX(rowid) FROM Cache)"
        database.execute(f"UPDATE Cache SET {change} {last_row}", {"bomb": bomb} if ":bomb" in change else {})
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
        assert "has been rebuilt from the files" in store.notes[0]
        assert {entry.address for entry in store.entries()} == {example_key(number).address for number in (0, 1)}
        assert store.stats()[0].size_bytes == 2 * ENTRY
        assert_same(store.get(KEY), example_chunk())
        put(store, 2)
        assert store.health()[0].ok


def test_what_is_planted_while_the_store_is_open_is_repaired_and_not_executed(
    store: DiskStore, folder: Path, bomb: bytes
) -> None:
    put(store, 0)
    plant(folder, PLANTED["value as its own kind"], bomb)
    assert store.pin(KEY)
    assert [entry.pinned for entry in store.entries()] == [True]
    assert_same(store.get(KEY), example_chunk())


@pytest.mark.parametrize(
    "junk", [b"this is no database" * 1000, b"SQLite format 3\0" + bytes(5000)], ids=["text", "zeros"]
)
def test_a_damaged_index_is_rebuilt_from_the_files(folder: Path, junk: bytes) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
    (folder / "index" / "cache.db").write_bytes(junk)
    with DiskStore(folder) as store:
        assert "has been rebuilt from the files" in store.notes[0]
        assert {entry.address for entry in store.entries()} == {example_key(number).address for number in (0, 1)}
        put(store, 2)


def test_a_missing_index_is_rebuilt_from_the_files(folder: Path) -> None:
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
    seams.disk_index(monkeypatch, locked)
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
    monkeypatch.setattr(store.quota.index, "transact", fail)
    for _ in range(100):
        assert not isinstance(store.get(KEY), Miss)
    with pytest.raises(StoreError, match="disk I/O error"):
        put(store, 1)
    assert not store.discard(KEY)
    monkeypatch.undo()
    assert torch.equal(store.get(KEY).blocks["key.0"], example_chunk().blocks["key.0"])  # type: ignore[union-attr]


OUTSIDE = {
    "being written": (WRITING, "{file}", KEY.address),
    "written about": (WRITING, "host-1-00.part", "../../{file}"),
    "in quarantine": (QUARANTINE, "{file}", ""),
    "an entry": (ENTRY_TAG, "../../{file}", ""),
    "pinned": (PINNED, "../../{file}", ""),
}


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """Give a file that is nobody's business."""
    file = tmp_path / "thesis.kv"
    file.write_text("twenty years of work")
    return file


def name_outside(store: DiskStore, tag: str, name: str, about: str, file: Path) -> None:
    """Write a row that has expired and names a file outside of the store."""
    assert store.quota is not None
    record = Record(EntryUsage(1, 0.0, 1.0, 1.0), about=about.format(file=file))
    store.quota.index.set(name.format(file=file), record, tag, expires=1.0)


@pytest.mark.parametrize(("tag", "name", "about"), OUTSIDE.values(), ids=OUTSIDE)
def test_an_index_that_names_files_outside_is_rebuilt(
    folder: Path, thesis: Path, tag: str, name: str, about: str
) -> None:
    with DiskStore(folder) as store:
        put(store, 0)
        name_outside(store, tag, name, about, thesis)
    with DiskStore(folder) as store:
        assert "has been rebuilt from the files" in store.notes[0]
        put(store, 1)
        collect_garbage(store)
        assert present(store, 2) == [True, True]
    assert thesis.exists()


@pytest.mark.parametrize(("tag", "name"), [(WRITING, "{file}"), (QUARANTINE, "{file}"), (WRITING, "../x.part")])
def test_what_the_index_names_outside_while_the_store_is_open_is_an_error(
    store: DiskStore, thesis: Path, tag: str, name: str
) -> None:
    put(store, 0)
    name_outside(store, tag, name, KEY.address, thesis)
    with pytest.raises(StoreError, match="not a file of this store; `qcfuse store rebuild` repairs it"):
        collect_garbage(store)
    assert thesis.exists()
    rebuild(store)
    assert collect_garbage(store) == 0
