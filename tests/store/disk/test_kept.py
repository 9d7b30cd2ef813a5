"""What a store on disk keeps across restarts and processes."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.testing import FINGERPRINT, assert_same, example_chunk, example_key
from tests.store.disk.folders import ENTRY, KEY, in_a_child, put, taken


def test_another_process_reads_what_this_one_wrote_and_the_other_way_round(store: DiskStore, folder: Path) -> None:
    def read_and_write() -> None:
        with DiskStore(folder) as other:
            assert_same(other.get(KEY), example_chunk())
            put(other, 1)

    put(store, 0)
    assert in_a_child(read_and_write) == 0
    assert_same(store.get(example_key(1)), example_chunk(1))
    assert store.stats()[0].size_bytes == 2 * ENTRY


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


@pytest.mark.parametrize("content", [b"no JSON", b"[1]"])
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


def test_what_is_no_address_leads_nowhere(folder: Path) -> None:
    (folder.parent / "secret.kv").write_text("not ours")
    with DiskStore(folder) as store:
        with pytest.raises(ValueError, match="not an address"):
            store.discard("../../../secret")
        assert "../../../secret" not in store
        assert store.open("../../../secret") == Miss("cannot be read: not an address: '../../../secret'")
    assert (folder.parent / "secret.kv").exists()
