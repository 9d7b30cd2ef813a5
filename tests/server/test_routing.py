"""Routing by cache affinity, compared with round-robin routing."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from qcfuse_rag.server.ray_serve import CHOICES, CacheAffinity, home_replicas

REPLICAS = [f"replica-{number}" for number in range(8)]
Route = Callable[[Sequence[str], list[int], int], int]


class Memory:
    """A replica's memory tier: the passages last used."""

    def __init__(self, room: int) -> None:
        self._room, self._held = room, OrderedDict[str, None]()
        self.hits = self.lookups = 0

    def ask(self, passages: Sequence[str]) -> None:
        for passage in passages:
            self.lookups += 1
            self.hits += passage in self._held
            self._held[passage] = None
            self._held.move_to_end(passage)
            while len(self._held) > self._room:
                self._held.popitem(last=False)


def by_turns(passages: Sequence[str], busy: list[int], number: int) -> int:
    return number % len(busy)


def by_affinity(remembered: int, choices: int = CHOICES) -> Route:
    affinity = CacheAffinity(remembered)

    def route(passages: Sequence[str], busy: list[int], number: int) -> int:
        chosen = [REPLICAS.index(name) for name in affinity.choose(passages, REPLICAS)[:choices]]
        best = min(chosen, key=lambda replica: busy[replica])
        affinity.record(passages, REPLICAS[best])
        return best

    return route


def workload(requests: int, *, passages: int, topics: int, seed: int) -> list[list[str]]:
    """Questions about topics, some far more often than others (Zipf 1.1); five of a topic's passages each."""
    draw = np.random.default_rng(seed)
    share = 1 / np.arange(1, topics + 1) ** 1.1
    asked = draw.choice(topics, size=requests, p=share / share.sum())
    per_topic = passages // topics
    return [[f"{topic}/{n}" for n in draw.choice(per_topic, size=5, replace=False)] for topic in asked]


def simulate(route: Route, requests: list[list[str]], *, room: int, answer_takes: int = 6) -> tuple[float, int]:
    """Return the share of passages found in memory, and the longest queue."""
    memories = [Memory(room) for _ in REPLICAS]
    leaves: list[list[int]] = [[] for _ in REPLICAS]
    longest = 0
    for number, passages in enumerate(requests):
        leaves = [[end for end in ends if end > number] for ends in leaves]
        busy = [len(ends) for ends in leaves]
        chosen = route(passages, busy, number)
        leaves[chosen].append(max([number, *leaves[chosen]]) + answer_takes)
        longest = max(longest, len(leaves[chosen]))
        memories[chosen].ask(passages)
    return sum(memory.hits for memory in memories) / sum(memory.lookups for memory in memories), longest


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_skewed_workload_finds_half_as_much_again_in_memory(seed: int) -> None:
    requests = workload(6000, passages=4000, topics=200, seed=seed)
    turns, _ = simulate(by_turns, requests, room=150)
    affine, _ = simulate(by_affinity(600), requests, room=150)  # it does not know how much fits
    print(f"found in memory: {turns:.2f} by turns, {affine:.2f} by affinity, {affine / turns:.2f} times")
    assert affine >= 1.5 * turns


def test_what_many_ask_for_has_two_homes_and_not_one() -> None:
    """A single home would have a line as long as the favourite topic is popular; two halve it."""
    requests = workload(4000, passages=4000, topics=200, seed=5)

    _, longest_of_two = simulate(by_affinity(600), requests, room=150)
    _, longest_of_one = simulate(by_affinity(600, choices=1), requests, room=150)
    assert longest_of_two < longest_of_one


passage_lists = st.lists(st.text(max_size=8), min_size=1, max_size=6)


@given(passages=passage_lists, count=st.integers(1, 8))
def test_candidates_are_two_of_the_replicas_whatever_order_they_come_in(passages: list[str], count: int) -> None:
    replicas = REPLICAS[:count]
    affinity = CacheAffinity()
    chosen = affinity.choose(passages, replicas)
    assert len(chosen) == len(set(chosen)) == min(CHOICES, max(1, count // 2))
    assert set(chosen) <= set(replicas)
    assert affinity.choose(passages, replicas[::-1]) == chosen
    affinity.record(passages, replicas[-1])
    assert replicas[-1] in affinity.choose(passages, replicas), "it has them now"
    assert replicas[-1] not in affinity.choose(passages, replicas[:-1])
    assert affinity.choose(passages, []) == []


@given(passage=st.text(max_size=8), gone=st.sampled_from(REPLICAS))
def test_a_replica_that_goes_moves_only_what_was_at_home_there(passage: str, gone: str) -> None:
    before, after = (
        home_replicas(passage, REPLICAS),
        home_replicas(passage, [name for name in REPLICAS if name != gone]),
    )
    assert [name for name in before if name != gone] == after[: len(before) - (gone in before)]


def test_text_that_is_no_unicode_is_routed_like_any_other() -> None:
    """A router that raises would never answer the request, nor whoever waits behind it."""
    affinity = CacheAffinity()
    for _ in range(2):
        (chosen,) = affinity.choose(["\ud800"], REPLICAS[:2])
        affinity.record(["\ud800"], chosen)
    assert home_replicas("\ud800", REPLICAS) != home_replicas("\ud801", REPLICAS)


def test_homes_are_even() -> None:
    counts = Counter(name for number in range(4000) for name in home_replicas(f"passage {number}", REPLICAS))
    assert set(counts) == set(REPLICAS)
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_a_request_without_passages_may_go_anywhere() -> None:
    assert CacheAffinity().choose([], REPLICAS) == REPLICAS


def test_what_is_remembered_is_bounded() -> None:
    affinity = CacheAffinity(remembered=3)
    affinity.record(["a", "b", "c", "d"], REPLICAS[7])
    assert affinity._recent[REPLICAS[7]].keys() == {xxhash.xxh64_intdigest(passage) for passage in (b"b", b"c", b"d")}
