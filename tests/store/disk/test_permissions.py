"""Files and folders that the user may not read or write.

Root may do all that, so the work runs in a process that has given up this privilege.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.admin import fsck
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import KEY, file_of, in_a_child, put
from tests.support.privileges import obey_permissions


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a store with two entries, one of them with a source, and one in quarantine."""
    folder = tmp_path / "kept"
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        put(store, 0, 1, 2)
        store.discard(example_key(2), "looks odd")
        sources.replace("kept", [KEY, example_key(1)])
    return folder


def obeyed(work: Callable[[], object]) -> bool:
    """Return whether something succeeds under file permissions."""

    def work_unprivileged() -> None:
        obey_permissions()
        work()

    return in_a_child(work_unprivileged) == 0


def test_permissions_are_obeyed_here(tmp_path: Path) -> None:
    """Or nothing below would be a test."""
    (tmp_path / "file").touch(0o000)
    assert not obeyed((tmp_path / "file").read_bytes)


def test_an_entry_that_may_not_be_read_is_a_miss_with_the_reason_and_stays(kept: Path) -> None:
    with DiskStore(kept) as store:
        path = file_of(store)
    path.chmod(0o000)

    def look() -> None:
        with DiskStore(kept) as store:
            found = store.get(KEY)
            assert isinstance(found, Miss)
            assert "Permission denied" in found.reason
            assert_same(store.get(example_key(1)), example_chunk(1))
            report = fsck(store)
            assert [address for address, _ in report.unread] == [KEY.address], report
            assert (report.damaged, report.sound) == ([], 1)

    assert obeyed(look)
    path.chmod(0o600)
    with DiskStore(kept) as store:
        assert_same(store.get(KEY), example_chunk())


def test_a_store_that_may_only_be_read_answers_and_says_that_it_keeps_nothing(kept: Path) -> None:
    folders = [kept, *(path for path in kept.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)

    def look() -> None:
        with DiskStore(kept) as store:
            assert_same(store.get(KEY), example_chunk())
            with pytest.raises(StoreError, match=r"Permission denied|cannot be opened|readonly"):
                put(store, 3)

    assert obeyed(look)
    for folder in folders:
        folder.chmod(0o700)
