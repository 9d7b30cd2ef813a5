"""The plan of what to read: each passage is read once, and the next entry takes the place of one that is unreadable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, TieredStore, make_method
from qcfuse_rag.fusion.lookup import plan_lookups, rows_if_stored
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import BLIND, FRAMED, PRIMED, ChunkKey, hash_ids
from tests.support.engines import damaged, look_up, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

AUTO = make_method("auto", ratio=0.2, guard=False)
GUARDED = make_method("auto", ratio=0.2)


class Watched(MemoryStore):
    """Counts what is read, by base; entries of some bases vanish or are damaged when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[ChunkKey] = []
        self.vanishing: set[str] = set()
        self.broken: dict[str, str] = {}

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        self.read.append(key)
        if key.base in self.vanishing:
            self.discard(key)
        found = super().get(key)
        if key.base in self.broken and isinstance(found, ChunkKV):
            return damaged(found, self.broken[key.base])
        return found


def reads(store: Watched) -> list[int]:
    """How often the prefix and each passage were read, under any base."""
    return sorted(Counter(key.ids for key in store.read).values())


@pytest.fixture
def store() -> Watched:
    return Watched()


@pytest.mark.parametrize("method", [AUTO, GUARDED, make_method("reuse", base=FRAMED)], ids=["auto", "guarded", "reuse"])
@pytest.mark.parametrize("bases", [(FRAMED, PRIMED), (FRAMED,), (PRIMED,), (BLIND,)], ids=lambda bases: bases[0].name)
def test_each_passage_is_read_once_whatever_is_stored(
    llama: LanguageModel, store: Watched, method: Method, bases: tuple[object, ...]
) -> None:
    engine = make_warmed_engine(llama, store, method=method, texts=PASSAGES[:2], bases=bases)
    store.read.clear()
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES)).report
    if report.base is None:
        assert not store.read, "the guard refused, and nothing was read"
    else:
        assert reads(store) == [1] * (1 + len(PASSAGES))


def test_the_first_passage_is_read_framed_and_its_primed_entry_stays_on_disk(
    llama: LanguageModel, tmp_path: Path
) -> None:
    with DiskStore(tmp_path) as disk:
        FusionEngine(llama, disk, method=AUTO).warm(PASSAGES, bases=(FRAMED, PRIMED))
    with TieredStore(MemoryStore(), DiskStore(tmp_path)) as tiered:
        engine = FusionEngine(llama, tiered, method=AUTO)
        engine.prefill(engine.prompt(QUESTION, PASSAGES))
        assert tiered.near.stats()[0].entries == 1 + len(PASSAGES)


def test_the_guard_prices_what_is_read(llama: LanguageModel, store: Watched) -> None:
    engine = make_warmed_engine(llama, store, method=AUTO, texts=PASSAGES[:2], bases=(FRAMED, PRIMED))
    prompt = engine.prompt(QUESTION, PASSAGES)
    plan = plan_lookups(llama, store, prompt, AUTO)
    assert [lookup.candidates[0].base.name for lookup in plan.lookups] == ["blind", "framed", "primed", "primed"]
    assert [lookup.stored for lookup in plan.lookups] == [True, True, True, False]
    report, estimate = engine.prefill(prompt).report, plan.estimate
    assert [lookup.hit for lookup in report.lookups] == [lookup.stored for lookup in plan.lookups]
    assert (estimate.rows, estimate.selected_tokens) == (report.rows, len(report.selected))


def test_an_entry_that_vanishes_after_the_plan_gives_way_to_the_next(llama: LanguageModel, store: Watched) -> None:
    engine = make_warmed_engine(llama, store, method=AUTO, bases=(FRAMED, PRIMED))
    store.vanishing = {"primed"}
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES)).report
    assert [lookup.note for lookup in report.lookups[1:]] == [None, *["framed instead of primed"] * 2]
    assert report.fallback is None


@pytest.mark.parametrize("block", ["key.0", "value.3"])
def test_a_damaged_entry_gives_way_to_the_next_with_the_reason(
    llama: LanguageModel, store: Watched, block: str
) -> None:
    """The first layer is read before the pass begins, the last one while it runs."""
    engine = make_warmed_engine(llama, store, method=AUTO, bases=(FRAMED, PRIMED))
    store.read.clear()
    store.broken = {"primed": block}
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES)).report
    assert [lookup.hit for lookup in report.lookups] == [True] * 4
    assert [str(lookup.note).split(":")[0] for lookup in report.lookups[2:]] == ["framed instead of primed"] * 2
    assert all("checksum" in str(lookup.note) for lookup in report.lookups[2:])
    assert reads(store) == [1, 1, 2, 2]
    store.broken, store.read = {}, []
    again = engine.prefill(engine.prompt(QUESTION, PASSAGES)).report
    assert {lookup.note for lookup in again.lookups[2:]} == {"framed instead of primed"}, "it was discarded"


def test_a_passage_all_of_whose_entries_are_damaged_is_computed_and_says_why(
    llama: LanguageModel, store: Watched
) -> None:
    engine = make_warmed_engine(llama, store, method=AUTO, bases=(FRAMED, PRIMED))
    store.broken = {"primed": "key.1", "framed": "key.1"}
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES)).report
    assert [lookup.hit for lookup in report.lookups] == [True, False, False, False]
    assert "3 of 3 passages computed in full" in str(report.fallback)
    assert "checksum" in str(report.fallback)


@pytest.mark.parametrize("start", [0, 3])
def test_a_part_behind_the_system_prefix_is_exact_only_from_its_first_token(llama: LanguageModel, start: int) -> None:
    engine = make_warmed_engine(llama, texts=PASSAGES[:1], bases=(FRAMED,))
    prefix_ids, ids = engine.prompts.prefix_ids, engine.prompts.chunk_ids(PASSAGES[0])
    segments = (
        Segment(Role.SYSTEM_PREFIX, prefix_ids, ""),
        Segment(Role.CHUNK, ids[start:], "", ChunkPart(hash_ids(ids), len(ids), start)),
        Segment(Role.QUESTION, ids[:4], ""),
    )
    prompt = Prompt(segments, prefix_ids=prefix_ids)
    fused = FusedPrompt.empty(engine.runner, prompt, len(prompt))
    fused.load(look_up(engine.lm, engine.store, prompt, make_method("reuse", base=FRAMED)), WaitBudget(None))
    fused.await_all()
    assert [placed.exact for placed in fused.placed_chunks] == [start == 0]


def test_rows_behind_what_an_earlier_request_computed_are_those_of_the_passages_that_follow(
    engine: FusionEngine,
) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    passed, *following = prompt.chunks
    passages = sum(map(len, following))
    rows = rows_if_stored(prompt, make_method("random", ratio=0.5), passed.stop)
    assert rows == len(prompt) - passed.stop - passages + int(0.5 * passages)
