"""Writers to a store on disk that die."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.store.backends.files import process_namespace
from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.store.disk.folders import ENTRY, KEY, later, put, taken


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch, gone: int) -> Callable[[DiskStore], None]:
    """Let what a store writes from now on be written by a process that is gone."""

    def die(store: DiskStore) -> None:
        name = f"{process_namespace()}-{gone}-0123456789abcdef.part"
        monkeypatch.setattr(store.files, "new_temporary", lambda: store.files.tmp / name)

    return die


def test_the_reservation_of_a_dead_writer_is_released(folder: Path, dead: Callable[[DiskStore], None]) -> None:
    with DiskStore(folder) as store:
        put(store, 2)
        dead(store)
        reserved = store.quota.reserve(example_key(1).address, 2 * ENTRY)
        reserved.temporary.write_bytes(b"half an entry")
        store.discard(example_key(2))
    with DiskStore(folder, 3 * ENTRY) as store:
        put(store, 0)
        assert store.stats()[0].size_bytes == taken(folder) == ENTRY
        assert list(store.files.tmp.iterdir()) == []


def test_the_reservation_of_a_living_writer_is_not_before_it_is_old(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(folder, 3 * ENTRY) as store:
        reserved = store.quota.reserve(example_key(1).address, ENTRY)
        reserved.temporary.write_bytes(b"half an entry")
        put(store, 0, 2, 3)
        assert store.stats()[0].size_bytes == 3 * ENTRY
        assert reserved.temporary.exists()
        later(monkeypatch, 3600.0)
        put(store, 4)
        with pytest.raises(OSError, match="No such file"):
            store.quota.publish(reserved, "model", 1.0, None)
        assert store.stats()[0].size_bytes == taken(folder) == 3 * ENTRY


@pytest.mark.parametrize("replaced", [False, True])
def test_an_entry_whose_writer_died_before_it_was_indexed_is_taken_up(
    folder: Path, dead: Callable[[DiskStore], None], replaced: bool
) -> None:
    """Also if it is larger than one that it replaced."""
    with DiskStore(folder) as store:
        put(store, 0 if replaced else 1)
        dead(store)
        parts = encode(KEY, example_chunk(n_tokens=300 if replaced else 5))
        reserved = store.quota.reserve(KEY.address, sum(map(len, parts)))
        store.files.write(reserved.temporary, parts)
        store.files.publish(reserved.temporary, KEY.address)
    with DiskStore(folder) as store:
        put(store, 2)
        numbers = (0, 2) if replaced else (0, 1, 2)
        assert {entry.address for entry in store.entries()} == {example_key(number).address for number in numbers}
        assert store.stats()[0].size_bytes == taken(folder) >= 3 * ENTRY


def test_a_writer_in_another_container_is_not_taken_for_dead(store: DiskStore, gone: int) -> None:
    """Of the same name, over the same folder, with process numbers of its own."""
    assert store.files.is_abandoned(f"{process_namespace()}-{gone}-0123456789abcdef.part")
    assert not store.files.is_abandoned(f"{process_namespace()}0-{gone}-0123456789abcdef.part")
    assert not store.files.is_abandoned(f"{process_namespace()}-{os.getpid()}-0123456789abcdef.part")
