"""A store on disk stays within its limit at every moment, and expired entries make room first."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import ENTRY, KEY, later, present, put, taken


@pytest.mark.parametrize("eviction", ["cost", "lru", "lfu"])
def test_the_limit_is_never_exceeded_not_even_while_writing(
    folder: Path, eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, most = 10 * ENTRY, 0
    with DiskStore(folder, limit, eviction=eviction) as store:
        write = store.files.write

        def watched(path: Path, parts: Sequence[bytes]) -> None:
            nonlocal most
            write(path, parts)
            most = max(most, taken(folder))

        monkeypatch.setattr(store.files, "write", watched)
        for number in range(50):
            tokens = 1 + (number * 97) % 400
            store.put(example_key(number % 30), example_chunk(number, n_tokens=tokens), saved_ms=float(tokens))
            assert taken(folder) == store.stats()[0].size_bytes <= limit
            assert_same(store.get(example_key(number % 30)), example_chunk(number, n_tokens=tokens))
        assert store.stats()[0].evicted > 0
    assert limit / 2 < most <= limit


def test_the_limit_holds_for_all_writers_together(folder: Path) -> None:
    limit, sizes = 4 * ENTRY, []

    def work(first: int) -> None:
        with DiskStore(folder, limit) as store:
            for number in range(first, first + 10):
                put(store, number)
                sizes.append(store.stats()[0].size_bytes)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 30
    assert max(sizes) <= limit
    assert taken(folder) <= limit


def test_what_is_pinned_stays_so_when_replaced_and_after_a_restart(folder: Path) -> None:
    with DiskStore(folder) as store:
        put(store, 0)
        store.pin(KEY)
        put(store, 0)
        assert [entry.pinned for entry in store.entries()] == [True]
    with DiskStore(folder) as store:
        assert [entry.pinned for entry in store.entries()] == [True]


def test_uses_count_over_a_restart(folder: Path) -> None:
    with DiskStore(folder, 2 * ENTRY, eviction="lfu") as store:
        put(store, 0, 1)
        store.get(KEY)
    with DiskStore(folder) as store:
        put(store, 2)
        assert present(store, 3) == [True, False, True]


def test_a_writer_waits_for_bytes_that_another_has_reserved(folder: Path) -> None:
    with DiskStore(folder, 2 * ENTRY) as store:
        reserved = store.quota.reserve(example_key(1).address, 2 * ENTRY)
        writer = threading.Thread(target=put, args=(store, 0))
        writer.start()
        writer.join(0.1)
        assert writer.is_alive()
        store.quota.release(reserved)
        writer.join(20.0)
        assert_same(store.get(KEY), example_chunk())


def test_a_limit_that_is_lowered_holds_from_then_on(folder: Path) -> None:
    with DiskStore(folder) as store:
        for number in range(8):
            store.put(example_key(number), example_chunk(number))
        store.pin(example_key(3))
        taken = store.stats()[0].size_bytes
    with DiskStore(folder, taken // 2) as store:
        [now] = store.stats()
        assert now.size_bytes <= taken // 2
        assert now.entries == 4
        assert example_key(3) in store
        assert store.health()[0].ok
    with DiskStore(folder, taken // 16) as store:
        assert [entry.address for entry in store.entries()] == [example_key(3).address], "what is pinned stays"
        assert "more than its limit, pinned ones" in str(store.health()[0].problems)


def test_expired_entries_go_before_all_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(folder, 3 * ENTRY) as store:
        store.put(KEY, example_chunk().with_expiry(time.time() + 60.0), saved_ms=1e6)
        store.pin(KEY)
        put(store, 1, 2)
        later(monkeypatch, 61.0)
        put(store, 3)
        assert present(store, 4) == [False, True, True, True]


def test_what_is_in_quarantine_lasts_no_longer_than_it_would_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(folder, ttl_s=60.0) as store:
        put(store, 0)
        store.discard(KEY, "looks odd")
        put(store, 1)
        assert taken(folder) == 2 * ENTRY
        later(monkeypatch, 61.0)
        put(store, 2)
        assert list((folder / "quarantine").iterdir()) == []
        assert store.stats()[0].size_bytes == taken(folder) == ENTRY


def test_what_was_over_when_it_was_found_damaged_makes_room_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(folder, ttl_s=60.0) as store:
        put(store, 0)
        later(monkeypatch, 61.0)
        store.discard(KEY, "looks odd")
        later(monkeypatch, 62.0)
        put(store, 1)
        assert list((folder / "quarantine").iterdir()) == []
