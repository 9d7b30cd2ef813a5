"""Which entry is evicted when the limit is reached."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qcfuse_rag import MemoryStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import (
    HALF_LIFE_S,
    POLICIES,
    EntryUsage,
    Miss,
    eviction_policy,
    least_frequently_used,
    least_saving,
)
from qcfuse_rag.store.testing import example_chunk, example_key

WEEK = HALF_LIFE_S
SIZE = example_chunk().nbytes


def usage(size_bytes: int = 1000, saved_ms: float = 10.0, uses: float = 1.0, used: float = 0.0) -> EntryUsage:
    return EntryUsage(size_bytes, saved_ms, uses, used)


usages = st.builds(
    EntryUsage,
    size_bytes=st.integers(1, 1 << 40),
    saved_ms=st.floats(0.001, 1e7),
    uses=st.floats(0.01, 1e6),
    used=st.floats(1.6e9, 1.9e9),
)


def test_a_use_a_week_ago_counts_half() -> None:
    assert least_frequently_used(usage(uses=2.0, used=0.0)) == least_frequently_used(usage(uses=1.0, used=WEEK))
    assert least_frequently_used(usage(uses=2.0, used=0.0)) < least_frequently_used(usage(uses=1.01, used=WEEK))


def test_uses_are_added_to_what_is_left_of_older_ones() -> None:
    assert usage(uses=4.0, used=0.0).after_uses(WEEK) == usage(uses=3.0, used=WEEK)
    assert usage(uses=4.0, used=0.0).after_uses(2 * WEEK, 5) == usage(uses=6.0, used=2 * WEEK)


def test_a_clock_that_was_put_back_makes_nothing_worth_more() -> None:
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


def test_a_policy_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no eviction policy 'fifo'; there are cost, lru, lfu"):
        eviction_policy("fifo")


# In memory; on disk the same policies are at work, see tests/store/disk.


def test_memory_never_holds_more_than_its_limit() -> None:
    store = MemoryStore(limit_bytes=3 * SIZE)
    for number in range(5):
        store.put(example_key(number), example_chunk(number))
        assert store.stats()[0].size_bytes <= 3 * SIZE
    assert [example_key(number) in store for number in range(5)] == [False, False, True, True, True]
    assert store.stats()[0].evicted == 2


def test_memory_forgets_the_least_recently_used() -> None:
    store = MemoryStore(limit_bytes=2 * SIZE)
    store.put(example_key(0), example_chunk(0))
    store.put(example_key(1), example_chunk(1))
    store.get(example_key(0))
    store.put(example_key(2), example_chunk(2))
    assert [example_key(number) in store for number in range(3)] == [True, False, True]


def test_memory_keeps_the_small_and_dear_before_the_large_and_cheap() -> None:
    store = MemoryStore(limit_bytes=7 * SIZE, eviction="cost")
    store.put(example_key(0), example_chunk(0), saved_ms=5000.0)
    store.put(example_key(1), example_chunk(1, n_tokens=20), saved_ms=50.0)
    store.put(example_key(2), example_chunk(2, n_tokens=20), saved_ms=60.0)
    assert [example_key(number) in store for number in range(3)] == [True, False, True]


def test_memory_does_not_forget_what_is_pinned() -> None:
    store = MemoryStore(limit_bytes=2 * SIZE)
    for number in range(4):
        store.put(example_key(number), example_chunk(number))
        store.pin(example_key(0))
    assert example_key(0) in store
    assert [entry.pinned for entry in store.entries()] == [True, False]
    store.pin(example_key(0), pinned=False)
    store.put(example_key(4), example_chunk(4))
    assert example_key(0) not in store


def test_a_chunk_for_which_there_can_be_no_room_is_an_error_that_says_why() -> None:
    with pytest.raises(StoreError, match=r"does not fit a memory store of 10 bytes$"):
        MemoryStore(limit_bytes=10).put(example_key(), example_chunk())
    store = MemoryStore(limit_bytes=2 * SIZE)
    for number in range(2):
        store.put(example_key(number), example_chunk(number))
        store.pin(example_key(number))
    with pytest.raises(StoreError, match=f"of which {2 * SIZE:,} are pinned"):
        store.put(example_key(2), example_chunk(2))
    assert [example_key(number) in store for number in range(2)] == [True, True]


def test_memory_with_a_time_to_live_gives_nothing_older(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(ttl_s=60.0)
    store.put(example_key(), example_chunk())
    [entry] = store.entries()
    assert not isinstance(store.get(example_key()), Miss)
    monkeypatch.setattr("time.time", lambda: entry.expires)
    assert store.get(example_key()) == Miss("expired")
    assert example_key() not in store
