"""Hints: entries expected next are in the near tier when they are used, whatever else passes through it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, TenantStore, TieredStore, make_method
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.hints import MAX_HINTS, OVERDUE_STEPS, Hints
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION

SIZE = example_chunk().nbytes
REUSE = make_method("reuse", base=FRAMED)
OTHERS = [f"On day {day} the {what} was painted by the school." for day, what in enumerate(["mill", "hull", "key"] * 3)]


def put(store: MemoryStore | TieredStore, *numbers: int) -> None:
    for number in numbers:
        store.put(example_key(number), example_chunk(number))


def held(store: MemoryStore, count: int = 12) -> list[int]:
    return [number for number in range(count) if example_key(number) in store]


@pytest.fixture
def tiered() -> TieredStore:
    """Return a store for three chunks near, and ten far."""
    store = TieredStore(MemoryStore(3 * SIZE), MemoryStore(1 << 20))
    put(store, *range(10))
    store.near.clear()
    return store


def settled(store: TieredStore) -> MemoryStore:
    """Wait for what is on its way; return the near tier."""
    store._reader.submit(lambda: None).result(20)
    assert isinstance(store.near, MemoryStore)
    return store.near


@pytest.mark.parametrize("hinted", [True, False])
def test_hinted_passages_are_in_memory_when_their_turn_comes(
    llama: LanguageModel, tmp_path: Path, hinted: bool
) -> None:
    """A chain of questions whose last step was known at its first: under LRU alone its passages are gone by then."""
    far = DiskStore(tmp_path)
    make_engine(llama, far).warm([*PASSAGES, *OTHERS])
    near_bytes = sum(entry.size_bytes for entry in far.entries()) // 2
    with make_engine(llama, TieredStore(MemoryStore(near_bytes), far)) as engine:
        engine.prefill(engine.prompt(QUESTION, PASSAGES), method=REUSE)
        if hinted:
            engine.corpus.hint_next(PASSAGES, steps=4, method=REUSE)
        for step in range(3):
            engine.prefill(engine.prompt(QUESTION, OTHERS[3 * step : 3 * step + 3]), method=REUSE)
        before = engine.store.tiers[0].stats()[0].hits
        engine.prefill(engine.prompt(QUESTION, PASSAGES), method=REUSE)
        hits = engine.store.tiers[0].stats()[0].hits - before
        assert hits >= 3 if hinted else hits <= 1, "the system prefix alone, if at all"


def test_a_hint_brings_passages_near(tiered: TieredStore) -> None:
    tiered.hint([example_key(4), example_key(5)])
    assert held(settled(tiered)) == [4, 5]


def test_what_is_not_expected_goes_first_then_what_is_expected_latest(tiered: TieredStore) -> None:
    tiered.hint([example_key(1)], steps=1)
    tiered.hint([example_key(2)], steps=5)
    tiered.get(example_key(3))
    assert held(settled(tiered)) == [1, 2, 3]
    tiered.hint([example_key(4)], steps=2)
    assert held(settled(tiered)) == [1, 2, 4]
    tiered.hint([example_key(5)], steps=3)
    assert held(settled(tiered)) == [1, 4, 5]


def test_nothing_is_brought_near_at_the_cost_of_something_sooner(tiered: TieredStore) -> None:
    tiered.hint([example_key(number) for number in range(3)], steps=2)
    settled(tiered)
    tiered.hint([example_key(3)], steps=7)
    assert not isinstance(tiered.get(example_key(9)), Miss), "it is read from where it is"
    assert held(settled(tiered)) == [0, 1, 2]


def test_prefetching_is_no_use_of_what_is_expected(tiered: TieredStore) -> None:
    tiered.hint([example_key(1)], steps=5)
    settled(tiered).discard(example_key(1))
    tiered.prefetch([example_key(1)])
    settled(tiered)
    for number in (7, 8, 9):
        tiered.get(example_key(number))
    assert held(settled(tiered)) == [1, 8, 9]


def test_a_used_passage_is_like_any_other_again(tiered: TieredStore) -> None:
    tiered.hint([example_key(number) for number in range(3)])
    settled(tiered)
    tiered.get(example_key(0))
    for number in (7, 8, 9):
        tiered.get(example_key(number))
    assert held(settled(tiered)) == [1, 2, 9]


def test_the_past_decides_among_what_nobody_expects() -> None:
    store = MemoryStore(3 * SIZE)
    put(store, 0, 1, 2)
    store.get(example_key(0))
    put(store, 3)
    assert held(store) == [0, 2, 3]


def test_hints_never_keep_a_store_from_taking_what_it_is_given() -> None:
    store = MemoryStore(3 * SIZE)
    store.hint([example_key(number) for number in range(12)])
    put(store, *range(12))
    assert len(held(store)) == 3
    assert example_key(11) in store


def test_hinting_passages_that_are_not_stored_is_harmless(llama: LanguageModel, tmp_path: Path) -> None:
    for store in (MemoryStore(), DiskStore(tmp_path), TieredStore(MemoryStore(), MemoryStore())):
        engine = make_engine(llama, store)
        engine.corpus.hint_next([*PASSAGES, ""], steps=2)
        engine.corpus.hint_next(PASSAGES, method=make_method("full"))
        engine.warm(PASSAGES)
        assert not engine.prefill(engine.prompt(QUESTION, PASSAGES), method=REUSE).report.missing


def test_a_hint_changes_no_answer(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, PASSAGES)
    before = engine.prefill(prompt, method=REUSE).logits
    engine.corpus.hint_next(PASSAGES)
    assert torch.equal(engine.prefill(prompt, method=REUSE).logits, before)


def test_tenants_hint_their_own(tiered: TieredStore) -> None:
    own = TenantStore(tiered, "one", b"0123456789abcdef")
    own.put(example_key(0), example_chunk(0))
    tiered.near.clear()
    own.hint([example_key(0)])
    assert own.address(example_key(0)) in settled(tiered)
    assert held(settled(tiered)) == []


def test_what_did_not_come_in_time_goes_before_what_is_to_come_and_is_forgotten_in_the_end() -> None:
    hints = Hints()
    hints.add(["late"], 1)
    hints.add(["soon"], 3)
    hints.add(["later"], 9)
    for _ in range(2):
        hints.advance()
    order = sorted(["soon", "late", "later", "never"], key=hints.urgency)
    assert order == ["never", "late", "later", "soon"]
    for _ in range(OVERDUE_STEPS + 20):
        hints.advance()
    assert len(hints) == 0


def test_saying_it_again_moves_a_passage() -> None:
    hints = Hints()
    hints.add(["a"], 9)
    hints.add(["b"], 5)
    assert hints.urgency("b") > hints.urgency("a")
    hints.add(["a"], 1)
    assert hints.urgency("a") > hints.urgency("b")


def test_hints_are_bounded_and_the_least_urgent_go() -> None:
    hints = Hints(most=3)
    for steps, address in enumerate("abcd", start=1):
        hints.add([address], steps)
    assert ["a" in hints, "b" in hints, "c" in hints, "d" in hints] == [True, True, True, False]
    assert Hints()._most == MAX_HINTS


def test_a_hint_looks_ahead(engine: FusionEngine) -> None:
    with pytest.raises(ValueError, match="at least 1 step ahead, got 0"):
        engine.corpus.hint_next(PASSAGES, steps=0)


def test_threads_may_share_hints() -> None:
    store = TieredStore(MemoryStore(3 * SIZE), MemoryStore(1 << 20))
    put(store, *range(10))
    wrong: list[object] = []

    def work(offset: int) -> None:
        for step in range(40):
            store.hint([example_key((step + offset) % 10)], steps=1 + step % 4)
            store.advance()
            found = store.get(example_key((step * 3 + offset) % 10))
            if isinstance(found, Miss):
                wrong.append(found)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    store.close()
    assert wrong == []
