"""An index that is deleted, overwritten, cut or replaced while stores use it: one index, and the limit holds."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.disk_index import Index
from qcfuse_rag.store.backends.index_database import Record, identity
from qcfuse_rag.store.maintenance import collect_garbage, fsck, rebuild
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import ENTRY, in_a_child, present, put, taken
from tests.support.cases import cases
from tests.support.index_attacks import ATTACKS, keep_older_copy

LIMIT = 6 * ENTRY


def check_agrees(store: DiskStore, folder: Path) -> None:
    """Check that the store is within its limit, and that its index has what the folder has."""
    assert taken(folder) <= LIMIT
    assert store.quota is not None
    assert store.quota.index.size() == taken(folder)
    assert {entry.address for entry in store.entries()} == {address for address, _ in store.files.entries()}


@pytest.mark.parametrize("attack", cases(ATTACKS, *ATTACKS[::4]))
def test_two_stores_go_on_with_one_index(folder: Path, attack: Callable[[Path], None]) -> None:
    with DiskStore(folder, LIMIT) as first, DiskStore(folder, LIMIT) as second:
        keep_older_copy(folder)
        put(first, 0, 1, 2)
        put(second, 3, 4, 5)
        attack(folder / "index")
        for number in range(6, 30):
            put((first, second)[number % 2], number)
            assert taken(folder) <= LIMIT
            assert_same((first, second)[1 - number % 2].get(example_key(number)), example_chunk(number))
        for store in (first, second):
            check_agrees(store, folder)
        with DiskStore(folder, LIMIT) as third:
            check_agrees(third, folder)
            assert fsck(third).clean


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    "what", cases(["put", "pin", "discard", "quarantine", "clear", "rebuild", "gc", "fsck", "stats"], "put", "stats")
)
def test_whatever_comes_next_finds_the_index_again(folder: Path, attack: Callable[[Path], None], what: str) -> None:
    with DiskStore(folder, LIMIT) as store, DiskStore(folder, LIMIT) as other:
        keep_older_copy(folder)
        put(store, 0, 1, 2)
        attack(folder / "index")
        do: dict[str, Callable[[], object]] = {
            "put": lambda: put(other, 3),
            "pin": lambda: other.pin(example_key(0)),
            "discard": lambda: other.discard(example_key(0)),
            "quarantine": lambda: other.discard(example_key(0), reason="a test"),
            "clear": other.clear,
            "rebuild": lambda: rebuild(other),
            "gc": lambda: collect_garbage(other),
            "fsck": lambda: fsck(other),
            "stats": other.stats,
        }
        with suppress(StoreError):  # such as that a table is gone; the next use finds another
            do[what]()
        put(store, 4)
        put(other, 5)
        for opened in (store, other):
            check_agrees(opened, folder)


@pytest.mark.parametrize("attack", ATTACKS)
def test_bytes_of_living_writers_stay_reserved(folder: Path, attack: Callable[[Path], None]) -> None:
    with DiskStore(folder, LIMIT) as writer, DiskStore(folder, LIMIT) as other:
        keep_older_copy(folder)
        reserved = [writer.quota.reserve(example_key(number).address, ENTRY) for number in (100, 101)]
        attack(folder / "index")
        put(other, *range(8))
        assert taken(folder) <= LIMIT
        for reservation in reserved:
            reservation.temporary.write_bytes(b"x" * ENTRY)
            writer.quota.publish(reservation, "model", 1.0, None)
            check_agrees(writer, folder)
        check_agrees(other, folder)


@pytest.mark.parametrize("dies", [False, True])
def test_rebuilding_keeps_the_reservations_of_living_writers_only(folder: Path, dies: bool) -> None:
    with DiskStore(folder, LIMIT) as store:
        put(store, 0)

        def reserve() -> None:
            with DiskStore(folder) as writer:
                writer.quota.reserve(example_key(100).address, 2 * ENTRY)

        assert in_a_child(reserve) == 0 if dies else not reserve()
        assert rebuild(store) == 1
        assert store.quota.index.size() == (1 if dies else 3) * ENTRY
        put(store, *range(8))
        assert taken(folder) <= LIMIT


def test_a_file_published_while_the_index_is_replaced_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check of the index and its commit: the row is written into a file that nobody has any more."""
    with DiskStore(folder, LIMIT) as store, DiskStore(folder, LIMIT) as other:
        publish = store.files.publish

        def replaced(temporary: Path, address: str) -> None:
            shutil.rmtree(folder / "index")
            DiskStore(folder, LIMIT).close()
            publish(temporary, address)

        with monkeypatch.context() as patch:
            patch.setattr(store.files, "publish", replaced)
            put(store, 0)
        check_agrees(store, folder)
        check_agrees(other, folder)


def test_bytes_reserved_while_the_index_is_replaced_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(folder, LIMIT) as store, DiskStore(folder, LIMIT) as other:
        allocate = store.files.allocate

        def replaced(path: Path, size: int) -> None:
            shutil.rmtree(folder / "index")
            put(other, *range(6))
            allocate(path, size)

        with monkeypatch.context() as patch:
            patch.setattr(store.files, "allocate", replaced)
            store.quota.reserve(example_key(100).address, 2 * ENTRY)
        assert taken(folder) <= LIMIT
        check_agrees(other, folder)


def test_threads_of_one_process_find_the_index_again(folder: Path) -> None:
    with DiskStore(folder, LIMIT) as store:
        ready, errors = threading.Barrier(5), list[BaseException]()

        def work(first: int) -> None:
            try:
                put(store, first)
                ready.wait()
                ready.wait()
                put(store, *range(first, first + 8))
            except BaseException as error:
                errors.append(error)
                ready.abort()

        threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        ready.wait()
        shutil.rmtree(folder / "index")
        ready.wait()
        for thread in threads:
            thread.join()
        assert errors == []
        check_agrees(store, folder)


def test_an_index_that_is_in_place_is_not_filled_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses and pins would be lost, and every file would be looked at."""
    with DiskStore(folder, LIMIT) as store:
        put(store, 9)
        refills = list[None]()
        monkeypatch.setattr(store.quota.index, "on_replaced", lambda: refills.append(None))
        thread = threading.Thread(target=put, args=(store, 0))
        thread.start()
        thread.join()
        with DiskStore(folder, LIMIT) as other:
            put(other, 1)
        put(store, 2)
        assert in_a_child(lambda: put(store, 3)) == 0
        put(store, 4)
        assert refills == []


def test_what_waited_for_the_lock_of_a_replaced_index_goes_into_the_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the rows of all that waited would be in an index that nobody reads, and the limit would not hold."""
    current: list[bool] = []
    real = Index.set

    def recorded(index: Index, name: str, record: Record, tag: str, expires: float | None = None) -> None:
        current.append(identity(folder / "index") == index._current.identity)
        real(index, name, record, tag, expires)

    with DiskStore(folder) as first, DiskStore(folder) as second:
        put(first, 0)
        monkeypatch.setattr(Index, "set", recorded)
        waiting = threading.Thread(target=put, args=(second, 1))
        with first.quota.index.transact():
            waiting.start()
            waiting.join(0.3)  # by then it waits for the lock
            shutil.rmtree(folder / "index")
        waiting.join()
        assert current
        assert all(current)
        assert present(first, 2) == present(second, 2) == [True, True]
