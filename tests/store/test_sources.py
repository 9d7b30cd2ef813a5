"""Sources: a changed or deleted document takes its own passages along, and nobody else's."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from qcfuse_rag import DiskStore, KVStore, MemoryStore, TieredStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.tenant import TenantStore
from qcfuse_rag.store.documents.sources import Manifest, Sources
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "kv") as store:
        yield store


@pytest.fixture
def sources(store: DiskStore) -> Iterator[Sources]:
    sources = Sources(store)
    yield sources
    sources.close()


def keys(*numbers: int) -> list[ChunkKey]:
    return [example_key(number) for number in numbers]


def stored(store: KVStore, *numbers: int) -> list[ChunkKey]:
    """Put chunks into a store and return their keys."""
    for number in numbers:
        store.put(example_key(number), example_chunk(number))
    return keys(*numbers)


def present(store: KVStore, count: int) -> list[int]:
    return [number for number in range(count) if example_key(number) in store]


def test_a_changed_document_takes_the_passages_with_it_that_it_had_alone(store: DiskStore, sources: Sources) -> None:
    sources.replace("a.md", stored(store, 0, 1, 2))
    assert sources.replace("a.md", [*keys(1), *stored(store, 3)]) == 2
    assert present(store, 4) == [1, 3]
    assert sources.addresses("a.md") == {key.address for key in keys(1, 3)}


def test_a_passage_that_two_documents_have_stays_until_the_last_one_goes(store: DiskStore, sources: Sources) -> None:
    sources.replace("a.md", stored(store, 0, 1))
    sources.replace("b.md", stored(store, 1, 2))
    assert sources.forget("a.md") == 1
    assert present(store, 3) == [1, 2]
    assert sources.forget("b.md") == 2
    assert (present(store, 3), sources.names()) == ([], [])


@pytest.mark.parametrize("own", [True, False], ids=["by this one", "by another process"])
def test_what_is_said_again_is_no_change(store: DiskStore, sources: Sources, own: bool) -> None:
    """By the version, processes know whether to read what they know again, and pipelines whether to warm again."""
    other = sources if own else Sources(store)
    said = stored(store, 0, 1)
    other.restrict("a.md", "board")
    other.replace("a.md", said)
    before = sources.manifest.version()
    other.restrict("a.md", "board")
    other.replace("a.md", said)
    other.add("a.md", said[:1])
    assert sources.manifest.version() == before
    other.add("b.md", said[:1])
    assert sources.manifest.version() != before
    other.close()


def test_what_cannot_be_written_is_an_error_at_once(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others who open the file are waited for; a folder that cannot be written will not change."""

    def unwritable(statement: str) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    Sources(store).close()
    monkeypatch.setattr(
        "qcfuse_rag.store.documents.sources.sqlite3.connect", lambda *_, **__: SimpleNamespace(execute=unwritable)
    )
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(StoreError, match="readonly"):
        Sources(store)


def test_a_manifest_on_a_read_only_mount_is_read(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is there already need not be written; see `tests.stress.test_disks` for real mounts."""
    with closing(Sources(store)) as before:
        before.replace("a.md", stored(store, 0))

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "chmod", read_only)
    with pytest.raises(StoreError, match="Read-only"):
        Sources(store)
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with closing(Sources(store)) as sources:
        assert sources.names() == ["a.md"]
        assert sources.replace("a.md", keys(0)) == 0
        for change in (lambda: sources.replace("a.md", keys(1)), lambda: sources.add("b.md", keys(0))):
            with pytest.raises(StoreError, match="cannot write the manifest of sources: attempt to write a readonly"):
                change()
    shutil.rmtree(store.folder)
    store.folder.mkdir()
    with pytest.raises(StoreError, match="Read-only"):
        Sources(store)


def test_what_is_forgotten_goes_from_all_tiers_pinned_or_not_and_nothing_else(tmp_path: Path) -> None:
    """Chunks that never had a source stay."""
    with TieredStore(MemoryStore(), DiskStore(tmp_path)) as store:
        sources = Sources(store)
        stored(store, 1)
        sources.replace("a.md", stored(store, 0))
        store.pin(example_key(0))
        assert sources.forget("a.md") == 1
        assert sources.garbage.collect() == 0
        assert [present(tier, 2) for tier in store.tiers] == [[1], [1]]


def test_missing_chunks_are_counted_by_source(store: DiskStore, sources: Sources) -> None:
    sources.replace("a.md", stored(store, 0, 1))
    sources.replace("b.md", stored(store, 1, 2, 3))
    sources.replace("c.md", stored(store, 4))
    assert sources.missing() == {}
    for key in keys(1, 2):
        store.discard(key)
    assert sources.missing() == {"a.md": 1, "b.md": 2}


@pytest.mark.parametrize("dies", [True, False], ids=["killed", "not removed"])
def test_what_a_crash_or_a_store_left_undone_is_finished_later(
    store: DiskStore, sources: Sources, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """The manifest is written first; the process ends before the store has done its part, or the store cannot."""

    def discard(key: object, reason: str | None = None) -> bool:
        if dies:
            raise KeyboardInterrupt
        return False

    sources.replace("a.md", stored(store, 0, 1))
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(store, "discard", discard)
        assert sources.forget("a.md") == 0
    assert (sources.names(), present(store, 2)) == ([], [0, 1])
    with closing(Sources(store)) as again:
        assert again.garbage.collect() == 2
        assert present(store, 2) == []
        assert again.garbage.collect() == 0


def test_a_chunk_taken_up_again_at_the_last_moment_is_not_removed_either(
    store: DiskStore, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking for what nobody wants and removing it."""
    other, begin = Sources(store), sources.manifest.writing

    def begin_late() -> object:
        if not other.names():
            other.replace("b.md", keys(0))
        return begin()

    sources.replace("a.md", stored(store, 0))
    with monkeypatch.context() as patch:
        patch.setattr(sources.garbage, "collect", lambda: 0)
        sources.forget("a.md")
    with monkeypatch.context() as patch:
        patch.setattr(sources.manifest, "writing", begin_late)
        assert sources.garbage.collect() == 0
    assert present(store, 1) == [0]


def test_writers_at_the_same_time_never_remove_what_another_has(store: DiskStore, tmp_path: Path) -> None:
    stored(store, *range(8))

    def work(number: int) -> None:
        with DiskStore(tmp_path / "kv") as own:
            sources = Sources(own)
            for step in range(8):
                sources.replace(f"{number}.md", keys(0, 1 + (step + number) % 7))
            sources.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    sources = Sources(store)
    assert sources.names() == ["0.md", "1.md", "2.md"]
    assert all(sources.addresses(f"{n}.md") == {key.address for key in keys(0, 1 + n)} for n in range(3))
    assert_same(store.get(example_key(0)), example_chunk(0))
    for name in sources.names():
        assert example_key(0) in store
        sources.forget(name)
    assert present(store, 8) == []


def test_documents_and_chunks_are_each_tenants_own(store: DiskStore) -> None:
    """Of the same name, and of an address that another names."""
    alice, bob = (TenantStore(store, name, bytes(range(32))) for name in ("alice", "bob"))
    with closing(Sources(alice)) as of_alice, closing(Sources(bob)) as of_bob:
        of_alice.replace("a.md", stored(alice, 0, 1))
        of_bob.replace("a.md", stored(bob, 0))
        assert (of_alice.names(), of_bob.names()) == (["a.md"], ["a.md"])
        assert of_bob.addresses("a.md") == {bob.address(example_key(0))}
        assert of_bob.remove("a.md", [alice.address(example_key(0))]) == 0
        assert_same(alice.get(example_key(0)), example_chunk(0))
        assert of_alice.forget("a.md") == 2
        assert of_bob.names() == ["a.md"]
        assert_same(bob.get(example_key(0)), example_chunk(0))


# Manifests that fail.


def test_a_damaged_manifest_is_one_clear_error(store: DiskStore) -> None:
    (store.folder / "sources.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match=r"cannot open .*sources\.db"):
        Sources(store)


def test_a_manifest_that_fails_later_is_one_clear_error(store: DiskStore, sources: Sources) -> None:
    sources.replace("a.md", stored(store, 0))
    sources.close()
    for act in (sources.names, sources.missing, sources.garbage.collect, lambda: sources.addresses("a.md")):
        with pytest.raises(StoreError, match="cannot read the manifest of sources"):
            act()
    with pytest.raises(StoreError, match="cannot write the manifest of sources"):
        sources.remove("a.md", keys(1))
    assert present(store, 1) == [0]


def test_another_model_or_wording_replaces_only_its_own(store: DiskStore, sources: Sources) -> None:
    """Two models over one folder must not take each other's caches of the same document."""
    other = [replace(key, fingerprint=replace(key.fingerprint, weights="tuned")) for key in keys(0, 1)]
    for key in other:
        store.put(key, example_chunk())
    sources.replace("a.md", stored(store, 0, 1))
    assert sources.replace("a.md", other) == 0
    assert sources.replace("a.md", other[:1]) == 1
    assert [key in store for key in (*keys(0, 1), *other)] == [True, True, True, False]
    assert sources.forget("a.md") == 3


def test_a_transaction_that_sqlite_rolled_back_itself_fails_with_the_cause() -> None:
    """As on a full disk."""

    def fill_up() -> None:
        with Manifest(None).writing() as database:
            database.execute("ROLLBACK")
            raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(StoreError, match="database or disk is full"):
        fill_up()


@pytest.mark.parametrize("foreign", [b"\x80\xff", b"", "../../elsewhere", "nothing", 7, "\x00"])
def test_rows_that_others_wrote_into_the_manifest_keep_nothing_from_being_forgotten(
    store: DiskStore, sources: Sources, foreign: object
) -> None:
    sources.replace("a.md", stored(store, 0, 1))
    with closing(sqlite3.connect(store.folder / "sources.db")) as database, database:
        for source in ("a.md", b"a blob", 7):
            database.execute("INSERT INTO chunks VALUES (?, ?, ?, ?)", (source, foreign, foreign, foreign))
        database.execute("INSERT OR REPLACE INTO unwanted VALUES (?, 1)", (foreign,))
        database.execute("INSERT INTO gone (address) VALUES (?)", (foreign,))
        database.execute("INSERT INTO derived VALUES (?, ?, ?)", (foreign, foreign, foreign))
    assert "a.md" in sources.names()
    assert not {b"a blob", foreign} & {*sources.names(), *sources.addresses("a.md")}
    assert sources.missing() == {}
    assert sources.garbage.removed_since(0)[1] == sources.garbage.ownerless() == []
    assert sources.forget("a.md") == 2
    assert (present(store, 2), sources.garbage.count(), sources.addresses("a.md")) == ([], 0, set())
    assert sources.garbage.collect_ownerless() == 0
