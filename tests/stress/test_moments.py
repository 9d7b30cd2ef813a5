"""Death at the worst moments, one by one: when a file has changed and the index has not yet, or the other way round."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.store.admin import collect_garbage, fsck
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.files import StoreFiles
from qcfuse_rag.store.testing import example_key
from tests.store.disk.folders import in_a_child
from tests.stress.content import chunk_of, files_of, wrong_bytes

LIMIT_BYTES = 400_000
OLD, PINNED, PUT_ASIDE, NEW = 3, 10, 4, 5
"""Chunks of 129, 300, 300 and 700 tokens: the last does not fit beside all others."""

DEEDS: dict[str, Callable[[DiskStore], object]] = {
    "put": lambda store: store.put(example_key(NEW), chunk_of(NEW)),
    "put again": lambda store: store.put(example_key(OLD), chunk_of(OLD)),
    "put again, pinned": lambda store: store.put(example_key(PINNED), chunk_of(PINNED)),
    "discard": lambda store: store.discard(example_key(OLD)),
    "quarantine": lambda store: store.discard(example_key(OLD), reason="to see what happens"),
    "gc": collect_garbage,
    "clear": lambda store: store.clear(),
}
MOMENTS = {
    "put": ("write", "publish"),
    "put again": ("publish",),
    "put again, pinned": ("publish",),
    "discard": ("remove",),
    "quarantine": ("quarantine",),
    "gc": ("remove_quarantined",),
    "clear": ("remove",),
}
"""Methods of `StoreFiles` after which the process dies, by what it does."""


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["model", "int8"], ids=["same-size", "other-size"])
@pytest.mark.parametrize(("deed", "name"), [(deed, name) for deed, names in MOMENTS.items() for name in names])
def test_death_right_after(deed: str, name: str, kv_dtype: str, tmp_path: Path) -> None:
    """Nothing wrong is read, and the books are right after `fsck`."""
    with DiskStore(tmp_path, LIMIT_BYTES) as store:
        for number in (PUT_ASIDE, OLD, PINNED):
            store.put(example_key(number), chunk_of(number))
        store.discard(example_key(PUT_ASIDE), reason="to see what happens")
        store.pin(example_key(PINNED))
    assert in_a_child_that_dies_after(StoreFiles, name, lambda: DEEDS[deed](DiskStore(tmp_path, kv_dtype=kv_dtype)))
    assert sum(size for path, size in files_of(tmp_path).items() if path.suffix != ".json") <= LIMIT_BYTES
    with DiskStore(tmp_path) as store:
        for number in (OLD, PINNED, NEW):
            found = store.get(example_key(number))
            if isinstance(found, Miss):
                assert found.reason == "absent"
            else:
                assert wrong_bytes(found, chunk_of(number, found.kv_dtype)) == 0
        assert not fsck(store).damaged
        assert fsck(store).clean
        sizes = sum(size for path, size in files_of(tmp_path).items() if path.suffix == ".kv")
        assert sizes == store.quota.index.size() <= LIMIT_BYTES
        if deed != "clear":
            assert [entry.pinned for entry in store.entries() if entry.address == example_key(PINNED).address] == [True]
        store.clear()
        assert list(store.files.entries()) == []


def test_opening_a_store_twice_does_not_loosen_the_index(tmp_path: Path) -> None:
    """Closing any descriptor of a file drops the process's locks on it (fcntl, POSIX), SQLite's too."""
    with DiskStore(tmp_path) as first:
        first.put(example_key(1), chunk_of(1))
        DiskStore(tmp_path).close()
        in_a_child(lambda: DiskStore(tmp_path).close())  # the last to close folds the journal up
        first.put(example_key(2), chunk_of(2))
        with DiskStore(tmp_path) as second:
            assert second.stats()[0].entries == 2
    with DiskStore(tmp_path) as third:
        assert fsck(third).clean
        assert third.stats()[0].entries == 2


def in_a_child_that_dies_after(owner: type, name: str, work: Callable[[], object]) -> bool:
    """Run something in a process that is killed when a method has first done its work; return whether that came."""

    def deadly() -> None:
        real = getattr(owner, name)

        def last(*arguments: object, **options: object) -> None:
            real(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, last)
        work()

    return in_a_child(deadly) == -signal.SIGKILL
