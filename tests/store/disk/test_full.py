"""Full disks."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.index import DiskQuota
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.store.disk.folders import ENTRY, present, put, taken


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
    index = store.quota.index
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


def test_health_says_when_the_disk_has_less_space_than_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(folder, 10 * ENTRY) as store:
        put(store, 0)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        [health] = store.health()
        assert (health.ok, health.problems) == (
            False,
            (f"may take {9 * ENTRY:,} bytes more, the disk has 1,000; lower the limit",),
        )


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
            patch.setattr("qcfuse_rag.store.backends.disk.open_index", full)
        store = DiskStore(folder)
        patch.setattr(DiskQuota, "remove", full)
        assert store.clear() == 3
        store.close()
    with DiskStore(folder) as store:
        assert store.stats()[0].size_bytes == 0
