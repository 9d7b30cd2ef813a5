"""Files of other programs in a store: no operation hangs on them, fails without a name, or leaves the folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import QCFuseError, StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.maintenance import collect_garbage, fsck, rebuild
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import ENTRY, KEY, file_of, put, taken
from tests.store.disk.planted import (
    ADDRESS,
    KINDS,
    OPERATIONS,
    PLACES,
    everything,
    make_outside,
    operate,
    plant,
)
from tests.support.cases import cases
from tests.support.cli import Run

MOST_SECONDS = 10


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return make_outside(tmp_path / "outside")


@pytest.fixture(autouse=True)
def _no_hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"it hangs for {MOST_SECONDS} s")

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MOST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "kind",
    cases(
        ["pipe", "full folder", "link to a file", "link to a folder", "deep JSON", "nothing"],
        "link to a folder",
    ),
)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_nothing_planted_hangs_or_fails_without_a_name_or_leads_outside(
    folder: Path, outside: Path, place: str, kind: str
) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
        Sources(store).close()
    before = everything(outside)
    plant(folder, place, kind, outside)
    operate(folder)
    assert everything(outside) == before


@pytest.mark.parametrize("kind", ["pipe", "socket", "full folder", "link to a file", "link to itself", "text"])
@pytest.mark.parametrize(
    "place", ["a copy", "capitals", "a short name", "no name", "another folder", "no folder of entries"]
)
def test_what_is_not_the_stores_is_named_and_left_alone(folder: Path, outside: Path, place: str, kind: str) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
    path = plant(folder, PLACES[place], kind, outside)
    shutil.rmtree(folder / "index")
    with DiskStore(folder, 10 * ENTRY) as store:
        assert store.health()[0].ok
        report = fsck(store)
        assert (report.strays, report.sound, report.clean) == ([PLACES[place]], 2, True)
        assert rebuild(store) == 2
        collect_garbage(store)
        assert store.clear() == 2
    assert os.path.lexists(path)


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to a file", "link to nothing", "link to itself"])
def test_something_in_an_entrys_place_is_a_miss_until_the_entry_is_stored_again(
    store: DiskStore, outside: Path, kind: str
) -> None:
    put(store, 0, 1)
    plant(store.folder, PLACES["an entry"], kind, outside)
    opened = store.get(KEY)
    assert isinstance(opened, Miss)
    assert "cannot be read" in opened.reason
    assert KEY not in store
    put(store, 0)
    assert_same(store.get(KEY), example_chunk())


@pytest.mark.parametrize("kind", ["folder", "full folder"])
def test_a_folder_in_an_entrys_place_is_one_clear_error(store: DiskStore, outside: Path, kind: str) -> None:
    put(store, 0, 1)
    plant(store.folder, PLACES["an entry"], kind, outside)
    assert isinstance(store.get(KEY), Miss)
    with pytest.raises(StoreError, match=r"cannot write to .*Is a directory"):
        put(store, 0)
    assert fsck(store).lost == 1
    assert_same(store.get(example_key(1)), example_chunk(1))


@pytest.mark.parametrize("name", ["objects", "tmp", "quarantine", "models", "index"])
def test_a_store_whose_own_folder_is_a_link_is_not_opened(folder: Path, outside: Path, name: str) -> None:
    with DiskStore(folder) as store:
        put(store, 0)
    (folder / name).rename(outside / name)
    (folder / name).symlink_to(outside / name)
    before = everything(outside)
    with pytest.raises(StoreError, match=f"{name} is a symbolic link; move the whole store"):
        DiskStore(folder)
    assert everything(outside) == before


def test_a_folder_of_entries_that_became_a_link_is_not_followed(store: DiskStore, folder: Path, outside: Path) -> None:
    """Neither to read, nor to write, evict, forget or clear."""
    put(store, 0)
    shard = file_of(store).parent
    shard.rename(outside / "entries")
    shard.symlink_to(outside / "entries")
    before = everything(outside)
    assert isinstance(store.get(KEY), Miss)
    with pytest.raises(StoreError, match="cannot write to"):
        put(store, 0)
    store.discard(KEY, "looks odd")
    store.discard(KEY)
    store.clear()
    operate(folder)
    assert everything(outside) == before


def test_a_store_may_itself_be_reached_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    folder.mkdir()
    with DiskStore(tmp_path / "link") as store:
        put(store, 0)
        assert_same(store.get(KEY), example_chunk())


# Rows of the index.

ROW = {"usage": {"size_bytes": 1, "saved_ms": 1.0, "uses": 1.0, "used": 1.0}, "numbers": "", "worth": 1.0, "about": ""}


def record(**changes: object) -> str:
    return json.dumps({**ROW, **changes})


def usage(**changes: object) -> str:
    return record(usage={**ROW["usage"], **changes})  # type: ignore[dict-item]


ODD = {
    "a deep record": ("value", '{"usage": {"size_bytes": 1}, "a": ' + "[" * 1500 + "]" * 1500 + "}"),
    "a very deep record": ("value", "[" * 100_000),
    "a list": ("value", "[]"),
    "a number": ("value", "7"),
    "an unknown field": ("value", record(colour="green")),
    "uses of text": ("value", usage(uses="many")),
    "no uses": ("value", usage(uses=0)),
    "negative uses": ("value", usage(uses=-1.0)),
    "used never": ("value", usage(used=None)),
    "saved a list": ("value", usage(saved_ms=[])),
    "worth of text": ("value", record(worth="much")),
    "worth of nothing": ("value", record(worth=None)),
    "no number": ("value", record(worth=float("nan"))),
    "endless": ("value", usage(saved_ms=float("inf"))),
    "numbers of no text": ("value", record(numbers=7)),
    "an unknown tag": ("tag", "mine"),
    "no tag": ("tag", None),
    "a tag of bytes": ("tag", b"entry"),
    "an expiry of text": ("expire_time", "tomorrow"),
    "an expiry of bytes": ("expire_time", b"\0"),
    "a size of text": ("size", "much"),
    "a negative size": ("size", -(10**12)),
    "a size of a fraction": ("size", 0.5),
    "a copy's name": ("key", f"{ADDRESS} (copy)"),
    "a short name": ("key", "ab"),
    "no name": ("key", ""),
    "dashes": ("key", "-" * 32),
    "a tenant's name": ("key", "a" * 49),
}


@pytest.mark.parametrize("while_open", [False, True])
@pytest.mark.parametrize(("column", "value"), ODD.values(), ids=ODD)
def test_an_odd_row_is_an_error_with_a_name_or_the_index_is_made_again(
    folder: Path, column: str, value: object, while_open: bool
) -> None:
    def change() -> None:
        with closing(sqlite3.connect(folder / "index" / "cache.db", isolation_level=None)) as database:
            database.execute("DROP INDEX Cache_worth")
            database.execute(f"UPDATE Cache SET {column} = ? WHERE key = ?", (value, ADDRESS))

    with DiskStore(folder) as store:
        put(store, 0, 1)
        if while_open:
            change()
            for operation in list(OPERATIONS.values())[:-2]:
                try:
                    operation(store)
                except QCFuseError:
                    continue
            return
    change()
    with DiskStore(folder, 10 * ENTRY) as store:
        assert "has been rebuilt from the files" in store.notes[0]
        assert store.health()[0].ok
        assert {entry.address for entry in store.entries()} == {example_key(number).address for number in (0, 1)}
        put(store, 2)


@pytest.mark.parametrize("name", ["size", "count", "disk_evil", "cull_limit", "sqlite_cache_size", "statistics"])
@pytest.mark.parametrize("value", ["text", None, -1e300])
def test_odd_settings_of_the_index_are_too(folder: Path, name: str, value: object) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
    with closing(sqlite3.connect(folder / "index" / "cache.db", isolation_level=None)) as database:
        database.execute("INSERT OR REPLACE INTO Settings (key, value) VALUES (?, ?)", (name, value))
    with DiskStore(folder, 10 * ENTRY) as store:
        assert store.health()[0].ok
        assert store.stats()[0].entries == 2
        assert_same(store.get(KEY), example_chunk())
        put(store, 2)
        fsck(store)


# The command line.


@pytest.mark.slow
@pytest.mark.parametrize("index", ["kept", "lost"])
@pytest.mark.parametrize("command", ["stats", "health", "fsck", "gc", "rebuild", "sources", "clear --yes"])
def test_a_copy_stops_no_command(run: Run, folder: Path, command: str, index: str) -> None:
    with DiskStore(folder, 10 * ENTRY) as store:
        put(store, 0, 1)
        shutil.copy(file_of(store), file_of(store).with_name(f"{ADDRESS} (copy).kv"))
    if index == "lost":
        shutil.rmtree(folder / "index")
    name, *options = command.split()
    code, out, err = run("store", name, "--store", folder, *options)
    assert code == 0, err
    assert ("(copy).kv; left alone" in out + err) == (name == "fsck")
    assert (folder / PLACES["a copy"]).exists()


@pytest.mark.parametrize(
    "kind", ["pipe", "socket", "folder", "link to a folder", "link to itself", "text", "deep JSON"]
)
def test_the_record_of_a_job_is_read_or_an_error_with_a_name(
    run: Run, tmp_path: Path, outside: Path, kind: str
) -> None:
    KINDS[kind](tmp_path / "warm.json", outside)
    for command in ("status", "resume"):
        code, _, err = run("warm", command, "--store", tmp_path)
        assert code == 1
        assert "start the job again" in err


# While the store is open.


@pytest.mark.parametrize("kind", ["link to a folder", "link to an empty folder", "pipe", "text"])
@pytest.mark.parametrize("place", ["objects", "tmp", "quarantine", "models", "index", "a folder of entries"])
def test_nothing_leads_outside_or_hangs_if_it_is_planted_while_the_store_is_open(
    folder: Path, outside: Path, place: str, kind: str
) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
        before = everything(outside)
        plant(folder, PLACES[place], kind, outside)
        for operation in OPERATIONS.values():
            with suppress(StoreError):
                operation(store)
    assert everything(outside) == before


@pytest.mark.parametrize("kind", ["pipe", "link to a folder", "link to an empty folder", "text"])
def test_a_store_without_an_index_can_be_cleared_and_has_one_once_that_is_possible(
    folder: Path, outside: Path, kind: str
) -> None:
    with DiskStore(folder) as store:
        put(store, 0, 1)
        shutil.rmtree(folder / "index")
        path = plant(folder, "index", kind, outside)
        if not path.is_symlink():
            with DiskStore(folder) as other:
                assert "its index cannot be opened" in other.health()[0].problems[0]
                with pytest.raises(StoreError, match="its index cannot be opened"):
                    put(other, 2)
                with pytest.raises(StoreError, match="its index cannot be opened"):
                    fsck(other)
                assert other.clear() == 2
                path.unlink()
                put(other, 2)
                assert (other.health()[0].ok, fsck(other).clean) == (True, True)
        else:
            with pytest.raises(StoreError, match="symbolic link"):
                put(store, 2)
            path.unlink()
            put(store, 2)
            assert fsck(store).clean


@pytest.mark.parametrize("value", ["deleted", "text", None])
def test_a_sum_of_bytes_that_is_gone_is_repaired_while_the_store_is_open(folder: Path, value: str | None) -> None:
    with DiskStore(folder, 10 * ENTRY) as store:
        put(store, 0)
        with closing(sqlite3.connect(folder / "index" / "cache.db", isolation_level=None)) as database:
            if value == "deleted":
                database.execute("DELETE FROM Settings WHERE key = 'size'")
            else:
                database.execute("UPDATE Settings SET value = ? WHERE key = 'size'", (value,))
        with suppress(StoreError):
            put(store, 1)
        put(store, 2)
        assert store.stats()[0].size_bytes == taken(folder)
