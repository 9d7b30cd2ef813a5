"""Which entry is evicted when the limit is reached."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qcfuse_rag import DiskStore, KVStore, MemoryStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import (
    HALF_LIFE_S,
    POLICIES,
    EntryUsage,
    Miss,
    least_frequently_used,
    least_saving,
)
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import ENTRY, KEY, later, present, put

WEEK = HALF_LIFE_S


def usage(size_bytes: int = 1000, saved_ms: float = 10.0, uses: float = 1.0, used: float = 0.0) -> EntryUsage:
    return EntryUsage(size_bytes, saved_ms, uses, used)


usages = st.builds(
    EntryUsage,
    size_bytes=st.integers(1, 1 << 40),
    saved_ms=st.floats(0.001, 1e7),
    uses=st.floats(0.01, 1e6),
    used=st.floats(1.6e9, 1.9e9),
)


def test_uses_a_week_ago_count_half_and_no_clock_makes_them_count_more() -> None:
    assert least_frequently_used(usage(uses=2.0, used=0.0)) == least_frequently_used(usage(uses=1.0, used=WEEK))
    assert least_frequently_used(usage(uses=2.0, used=0.0)) < least_frequently_used(usage(uses=1.01, used=WEEK))
    assert usage(uses=4.0, used=0.0).after_uses(WEEK) == usage(uses=3.0, used=WEEK)
    assert usage(uses=4.0, used=0.0).after_uses(2 * WEEK, 5) == usage(uses=6.0, used=2 * WEEK)
    assert usage(uses=4.0, used=WEEK).after_uses(0.0) == usage(uses=5.0, used=WEEK)


def test_cost_keeps_what_saves_more_for_every_byte() -> None:
    assert least_saving(usage(saved_ms=10.0)) < least_saving(usage(saved_ms=11.0))
    assert least_saving(usage(size_bytes=1001)) < least_saving(usage(size_bytes=1000))
    assert least_saving(usage(saved_ms=20.0, size_bytes=2000)) == least_saving(usage(saved_ms=10.0, size_bytes=1000))


@given(first=usages, second=usages, days=st.floats(0.0, 1000.0))
def test_the_order_is_that_of_todays_worth_and_of_any_later_days(
    first: EntryUsage, second: EntryUsage, days: float
) -> None:
    """So that a rank need not be computed again before an entry is used again."""
    now = max(first.used, second.used) + days * 24 * 3600.0

    def worth(u: EntryUsage) -> float:  # its logarithm: after years, worth itself is no longer a number above 0
        return math.log2(u.saved_ms / u.size_bytes * u.uses) - (now - u.used) / HALF_LIFE_S

    assume(abs(worth(first) - worth(second)) > 1e-3)
    assert (worth(first) < worth(second)) == (least_saving(first) < least_saving(second))


@given(usage=usages, hours=st.floats(0.0, 1e5), count=st.integers(1, 100))
def test_a_use_never_makes_an_entry_worth_less(usage: EntryUsage, hours: float, count: int) -> None:
    again = usage.after_uses(usage.used + hours * 3600.0, count)
    for worth in POLICIES.values():
        assert worth(again) >= worth(usage) - 1e-6


# Stores; what only one on disk does is in tests/store/disk.


@pytest.fixture(params=["memory", "disk"])
def room_for(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., KVStore]:
    """Give a function that opens a store, in memory or on disk, with room for so many entries."""

    def opened(entries: float, **options: object) -> KVStore:
        if request.param == "memory":
            return MemoryStore(int(entries * example_chunk().nbytes), **options)  # type: ignore[arg-type]
        return DiskStore(tmp_path, int(entries * ENTRY), **options)  # type: ignore[arg-type]

    return opened


def test_the_least_recently_used_goes_first(room_for: Callable[..., KVStore]) -> None:
    with room_for(3, eviction="lru") as store:
        put(store, 0, 1, 2)
        store.get(KEY)
        put(store, 3, 4)
        assert present(store, 5) == [True, False, False, True, True]
        [stats] = store.stats()
        assert (stats.entries, stats.evicted) == (3, 2)
        assert stats.size_bytes <= (stats.limit_bytes or 0)


def test_the_dear_stays_before_the_cheap(room_for: Callable[..., KVStore]) -> None:
    with room_for(2, eviction="cost") as store:
        for number, saved_ms in enumerate((5000.0, 10.0, 20.0)):
            put(store, number, saved_ms=saved_ms)
        assert present(store, 3) == [True, False, True]


def test_what_is_pinned_is_not_evicted_before_it_is_unpinned(room_for: Callable[..., KVStore]) -> None:
    with room_for(2, eviction="lru") as store:
        for number in range(4):
            put(store, number)
            assert store.pin(KEY)
        assert_same(store.get(KEY), example_chunk())
        assert [entry.address for entry in store.entries() if entry.pinned] == [KEY.address]
        store.pin(KEY, pinned=False)
        put(store, 4, 5)
        assert present(store, 6) == [False] * 4 + [True] * 2


def test_a_chunk_for_which_there_can_be_no_room_is_an_error_that_says_why(room_for: Callable[..., KVStore]) -> None:
    with room_for(2) as store:
        put(store, 0)
        with pytest.raises(StoreError, match=r"a chunk of [\d,]+ bytes does not fit a .*store of [\d,]+ bytes$"):
            store.put(example_key(1), example_chunk(1, n_tokens=500))
        put(store, 1)
        for number in range(2):
            store.pin(example_key(number))
        with pytest.raises(StoreError, match=f"does not fit .* of which {store.stats()[0].size_bytes:,} are pinned"):
            put(store, 2)
        assert present(store, 3) == [True, True, False]


def test_a_time_to_live_ends_an_entry(room_for: Callable[..., KVStore], monkeypatch: pytest.MonkeyPatch) -> None:
    with room_for(2, ttl_s=60.0) as store:
        put(store, 0)
        store.put(example_key(1), example_chunk(1).with_expiry(time.time() + 3600.0))  # its own counts
        assert_same(store.get(KEY), example_chunk())
        later(monkeypatch, 61.0)
        assert store.get(KEY) == Miss("expired")
        assert present(store, 2) == [False, True]
        assert store.stats()[0].entries == 1
