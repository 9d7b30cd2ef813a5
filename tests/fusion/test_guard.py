"""When not to fuse: never slower than full prefill, by prediction."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, TieredStore, make_method
from qcfuse_rag.errors import StoreError
from qcfuse_rag.fusion.guard import BreakEven, PrefillEstimate, predict_fused_s
from qcfuse_rag.fusion.lookup import look_up, plan_lookups
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import prefill
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.runtime.costs import Costs, costs_path, read_costs
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.loading.host_to_device import TransferOpener
from qcfuse_rag.runtime.loading.load_time import measure_loading
from qcfuse_rag.runtime.measured_costs import SAMPLES, measure_passes
from qcfuse_rag.store.backends.base import EntryInfo, Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import FRAMED
from tests.support import seams
from tests.support.damage import damaged
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.runners import loading_first

FAST = Costs(pass_s=0.01, row_s=0.001, load_s=1e-6)
LONG = PrefillEstimate(prompt_tokens=2000, stored_tokens=1950, selected_tokens=100, probe_rows=50, probe_share=0.5)


def guarded(ratio: float = 0.1) -> Method:
    return replace(make_method("qcfuse", ratio=ratio, base=FRAMED), guard=BreakEven())


@pytest.mark.parametrize(
    ("changed", "costs", "fuses"),
    [
        ({}, FAST, True),
        ({"selected_tokens": 1900}, FAST, False),
        ({"stored_tokens": 100, "selected_tokens": 5}, FAST, False),
        ({"prompt_tokens": 70, "stored_tokens": 30, "selected_tokens": 4, "probe_rows": 30}, FAST, False),
        ({}, replace(FAST, load_s=0.002), False),
        ({}, replace(FAST, pass_s=10.0), False),
    ],
    ids=["worth it", "ratio of 1", "little stored", "short prompt", "slow store", "dear passes"],
)
def test_what_is_fused_and_what_is_not(changed: dict[str, int], costs: Costs, fuses: bool) -> None:
    refusal = BreakEven().refusal(replace(LONG, **changed), costs)
    assert (refusal is None) == fuses
    assert fuses or "predicted to take" in str(refusal)


@given(
    stored=st.integers(0, 2000),
    selected=st.integers(0, 2000),
    load_s=st.floats(0, 0.01),
    pass_s=st.floats(0, 1),
    row_s=st.floats(1e-6, 0.01),
)
def test_what_is_fused_is_predicted_to_be_faster(
    stored: int, selected: int, load_s: float, pass_s: float, row_s: float
) -> None:
    ahead = replace(LONG, stored_tokens=stored, selected_tokens=min(selected, stored))
    if BreakEven(1.0).refusal(ahead, Costs(pass_s, row_s, load_s)) is None:
        rows = 2000 - stored + min(selected, stored)
        probe = 0.5 * (pass_s + 50 * row_s)
        assert stored * load_s + probe + pass_s + rows * row_s <= pass_s + 2000 * row_s


def test_an_outlook_is_what_then_happens(engine: FusionEngine) -> None:
    engine.warm(PASSAGES[:2], bases=(FRAMED,))
    prompt, method = engine.prompt(QUESTION, PASSAGES), guarded()
    ahead = plan_lookups(engine.lm, engine.store, prompt, method).estimate
    report = engine.prefill(prompt, method=replace(method, guard=None)).report
    assert ahead.prompt_tokens == report.prompt_tokens
    assert ahead.rows == report.rows
    assert ahead.selected_tokens == len(report.selected)
    assert ahead.stored_tokens == report.reused_tokens + len(report.selected)


def test_the_rows_of_a_probe_are_predicted_with_the_history_in_front_of_the_passages(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt = engine.prompt(QUESTION, PASSAGES, [("user", QUESTION), ("assistant", "Nobody knows.")])
    fused = FusedPrompt.empty(engine.runner, prompt, len(prompt))
    method = make_method("auto", base=FRAMED, ratio=0.5, exact_first=False, guard=False)
    fused.load(look_up(engine.lm, engine.store, prompt, method))
    rows = fused.probe_rows(suffix=True)
    assert int(rows[0]) < prompt.chunks[0].start, "the history is in front of the passages"
    assert plan_lookups(engine.lm, engine.store, prompt, method).estimate.probe_rows == len(rows)


def test_a_refused_prompt_is_computed_in_full_and_says_why(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt, method = engine.prompt(QUESTION, PASSAGES), guarded(ratio=1.0)
    done = prefill(loading_first(engine.lm, engine.store, costs=lambda: replace(FAST, load_s=0.1)), prompt, method)
    exact = engine.prefill(prompt, method=make_method("full"))
    assert torch.allclose(done.logits, exact.logits, atol=1e-4)
    assert done.report.method == "qcfuse"
    assert done.report.base is None
    assert str(done.report.fallback).startswith("computed in full, ")
    assert done.report.rows == len(prompt)


def test_a_prompt_without_any_stored_passage_says_that_and_is_not_the_guards(engine: FusionEngine) -> None:
    """Its system prefix is stored wherever anything was ever warmed, and saves next to nothing."""
    engine.warm(PASSAGES[:1], bases=(FRAMED,))
    dear = replace(FAST, load_s=0.1)
    report = prefill(
        loading_first(engine.lm, engine.store, costs=lambda: dear), engine.prompt(QUESTION, PASSAGES[1:]), guarded()
    ).report
    assert report.fallback == "2 of 2 passages computed in full: absent"
    assert [lookup.hit for lookup in report.lookups if lookup.role == "chunk"] == [False, False]


def test_a_guards_reason_names_what_was_absent_besides(engine: FusionEngine) -> None:
    engine.warm(PASSAGES[:1], bases=(FRAMED,))
    dear = replace(FAST, load_s=0.1)
    report = prefill(
        loading_first(engine.lm, engine.store, costs=lambda: dear), engine.prompt(QUESTION, PASSAGES), guarded()
    ).report
    assert str(report.fallback).startswith("computed in full, ")
    assert str(report.fallback).endswith("; 2 of 3 passages are absent")


def test_nothing_is_measured_for_a_prompt_of_which_nothing_is_stored(engine: FusionEngine) -> None:
    asked = []
    runner = loading_first(engine.lm, MemoryStore(), costs=lambda: asked.append(None) or FAST)
    prompt = engine.prompt(QUESTION, PASSAGES)
    assert prefill(runner, prompt, guarded()).report.rows == len(prompt)
    assert not asked


def test_an_error_while_costs_are_measured_costs_the_guard_alone(engine: FusionEngine) -> None:
    def fail() -> Costs:
        raise torch.OutOfMemoryError("no memory for 4,096 rows")

    engine.warm(PASSAGES, bases=(FRAMED,))
    runner, prompt = loading_first(engine.lm, engine.store, costs=fail), engine.prompt(QUESTION, PASSAGES)
    report = prefill(runner, prompt, guarded()).report
    assert (report.base, report.fallback) == ("framed", None)


def test_measuring_passes_is_no_waiting_for_the_store(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> Costs:
        time.sleep(0.6)
        return replace(FAST, load_s=0.0)

    seams.measured_passes(monkeypatch, slow)
    engine = make_engine(llama, MemoryStore(), load_limit_s=0.5)
    engine.warm(PASSAGES, bases=(FRAMED,))
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=guarded()).report
    assert "no answer" not in str(report.fallback)


def test_costs_with_kernels_or_another_attention_are_kept_apart(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(tmp_path) as store:
        paths = {costs_path(llama, store)}
        seams.costs_have_kernels(monkeypatch, lambda *_: True)
        paths.add(costs_path(llama, store))
        seams.costs_of_attention(monkeypatch, lambda *_: "flash-attn")
        paths.add(costs_path(llama, store))
    assert len(paths) == 3


def test_costs_are_measured_once_and_hold_for_the_engines_life(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    first = engine.runner.costs()
    engine.prefill(engine.prompt(QUESTION, PASSAGES), method=guarded())
    assert engine.runner.costs() == first
    assert first.row_s > 0
    assert first.load_s > 0


def test_loading_is_measured_when_there_is_something_to_load(llama: LanguageModel) -> None:
    engine = make_engine(llama, MemoryStore())
    assert engine.runner.costs().load_s == 0.0
    assert measure_loading(llama, engine.store, TransferOpener(llama)) is None
    engine.warm(PASSAGES, bases=(FRAMED,))
    assert engine.runner.costs().load_s > 0


def test_loading_is_measured_over_what_is_stored_blind_if_there_is_nothing_else(
    llama: LanguageModel, tmp_path: Path
) -> None:
    with DiskStore(tmp_path) as store:
        make_engine(llama, store).warm_prefix("You look after the boats of a small harbour.")
        assert make_engine(llama, store).runner.costs().load_s > 0
        assert list(tmp_path.glob("costs-*.json")), "the next process does not measure again"


def test_more_rows_are_predicted_to_take_longer(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seams.passes_take(monkeypatch, lambda rows: 0.5 + 0.002 * rows)
    costs = measure_passes(llama, PrefillRunner(llama))
    assert (costs.pass_s, costs.row_s) == (pytest.approx(0.5), pytest.approx(0.002))
    assert costs.full_pass_s(0) == 0
    assert costs.full_pass_s(1000) == pytest.approx(2.5)
    assert costs.full_pass_s(100) < costs.full_pass_s(1000)
    assert costs.partial_pass_s(100) == costs.full_pass_s(100)
    assert costs.partial_pass_s(100, share=0.5) == pytest.approx(costs.full_pass_s(100) / 2)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as on a GPU."""
    seams.launches_overlap(monkeypatch, lambda _: True)
    seams.timed_gpu_rows(monkeypatch, (128, 256))


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_full_prefill_also_takes_a_time_for_every_key(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is most of the time of a long prompt."""
    seams.passes_take(monkeypatch, lambda rows: max(0.1, 0.002 * rows + 1e-6 * rows**2))
    costs = measure_passes(llama, PrefillRunner(llama))
    assert (costs.row_s, costs.attended_key_s) == (pytest.approx(0.002), pytest.approx(2e-6))
    assert costs.sparse_attended_key_s == costs.attended_key_s
    assert costs.full_pass_s(2000) == pytest.approx(4 + 4)
    seams.passes_take(monkeypatch, lambda rows: max(0.1, 0.002 * rows - 1e-6 * rows**2))
    assert measure_passes(llama, PrefillRunner(llama)).attended_key_s == 0, (
        "a disturbed measurement does not make long prompts free"
    )
    seams.timed_gpu_rows(monkeypatch, (250, 256))
    seams.passes_take(monkeypatch, lambda rows: 0.002 * rows + (0.001 if rows == 256 else 0.0))
    assert measure_passes(llama, PrefillRunner(llama)).attended_key_s == 0, "sizes too near show noise"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("launch_s", "row_s", "found_s"),
    [(0.1, 0.002, 0.002), (0.3, 0.0018, 0.0018), (0.43, 0.0018, 0.0018), (0.5, 0.0018, 0.0), (0.5, 0.0, 0.0)],
)
def test_on_a_gpu_rows_are_computed_while_kernels_are_launched(
    launch_s: float, row_s: float, found_s: float, llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a pass takes the longer of both, and a pass that waits for the host tells nothing of rows."""
    seams.passes_take(monkeypatch, lambda rows: max(launch_s, row_s * rows))
    costs = measure_passes(llama, PrefillRunner(llama))
    assert (costs.pass_s, costs.row_s) == (pytest.approx(launch_s), pytest.approx(found_s))
    assert costs.full_pass_s(16) == pytest.approx(launch_s)
    assert costs.full_pass_s(2000) == pytest.approx(max(launch_s, 2000 * found_s))
    assert costs.partial_pass_s(500) == pytest.approx(max(launch_s, 500 * found_s))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("used_by_others", [0, 1, 2, 3])
def test_on_a_gpu_recorded_passes_are_timed_behind_few_and_many_keys(
    used_by_others: int, llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that another request kept from a recording tells nothing of recordings."""
    passes, timed = PrefillRunner(llama), list[int]()

    def seconds(_: object, rows: int, keys: int) -> float:
        timed.append(rows)
        passes.replayed += 0 if len(timed) == used_by_others else SAMPLES
        return 0.008 + 1e-5 * rows + 1e-8 * rows * (keys - rows / 2)

    monkeypatch.setattr(PrefillRunner, "most_rows", 640)
    seams.passes_take(monkeypatch, lambda rows: max(0.03, 1e-3 * rows))
    seams.partial_pass(monkeypatch, seconds)
    long = replace(llama, context_window=replace(llama.context_window, tokens=9000))
    costs = measure_passes(long, passes)
    if used_by_others == 1:
        assert costs.recorded_rows == 0
        return
    assert costs.recorded_rows == 640
    assert timed == [16, 512, 512]
    expected = (1e-5, 1e-8) if not used_by_others else (costs.row_s, costs.attended_key_s)
    assert (costs.recorded_row_s, costs.sparse_attended_key_s) == (
        pytest.approx(expected[0], rel=1e-3),
        pytest.approx(expected[1], rel=1e-3),
    )


def test_on_a_gpu_recorded_passes_have_a_cost_of_a_row_of_their_own() -> None:
    launched = Costs(pass_s=0.03, row_s=2e-5, launches_overlap=True)
    costs = replace(launched, recorded_rows=1024, recorded_pass_s=0.008, recorded_row_s=1e-5)
    assert costs.partial_pass_s(500) == pytest.approx(0.008 + 0.005)
    assert costs.partial_pass_s(1000) == pytest.approx(0.008 + 0.00512 + 488 * 2e-5), "more rows are bound by computing"
    assert costs.partial_pass_s(2000) == pytest.approx(0.04), "so many are launched kernel by kernel"
    assert costs.full_pass_s(500) == 0.03


def test_some_rows_of_a_long_prompt_take_a_time_for_every_key() -> None:
    costs = Costs(
        pass_s=1.0,
        row_s=1e-5,
        recorded_rows=4096,
        recorded_pass_s=0.01,
        recorded_row_s=1e-5,
        sparse_attended_key_s=1e-9,
    )
    assert costs.partial_pass_s(500, 10_000) == pytest.approx(costs.partial_pass_s(500) + 0.005)
    ahead = PrefillEstimate(11_000, stored_tokens=10_000, selected_tokens=500, probe_rows=0, probe_share=1.0)
    rows_s = costs.partial_pass_s(1500, 5500)
    assert predict_fused_s(ahead, costs) == pytest.approx(rows_s), "rows spread over a prompt see half of it"
    probe_s = costs.partial_pass_s(64, 11_000)
    assert predict_fused_s(replace(ahead, probe_rows=64), costs) == pytest.approx(probe_s + rows_s)


def test_all_rows_attend_to_what_an_earlier_request_has_computed() -> None:
    costs = Costs(1.0, 1e-5, recorded_rows=4096, recorded_pass_s=0.01, attended_key_s=2e-9, sparse_attended_key_s=1e-9)
    assert costs.full_pass_s(1000, held=9000) == pytest.approx(costs.full_pass_s(1000) + 1000 * 9000 * 2e-9)
    ahead = PrefillEstimate(1000, stored_tokens=900, selected_tokens=45, probe_rows=30, probe_share=1.0)
    later_s = predict_fused_s(replace(ahead, held_tokens=9000), costs)
    assert later_s == pytest.approx(predict_fused_s(ahead, costs) + (30 + 145) * 9000 * 1e-9)


@pytest.mark.parametrize("aside", [False, True])
def test_tokens_on_disk_are_copied_to_memory_before_anything_is_computed(aside: bool) -> None:
    costs = Costs(pass_s=0.1, row_s=1e-4, load_s=5e-5, near_load_s=1e-6, loading_overlaps=aside)
    near = replace(LONG, near_tokens=LONG.stored_tokens)
    copied_s = predict_fused_s(replace(near, near_tokens=950), costs) - predict_fused_s(near, costs)
    assert copied_s == pytest.approx(1000 * 4.9e-5)


def test_recorded_passes_are_predicted_by_what_they_take() -> None:
    """Full prefill is launched as ever: only what fusing computes gets cheaper."""
    costs = Costs(pass_s=1.0, row_s=0.001)
    ahead = PrefillEstimate(1000, stored_tokens=900, selected_tokens=45, probe_rows=30, probe_share=1.0)
    assert BreakEven().refusal(ahead, costs) is not None
    recorded = replace(costs, recorded_rows=1024, recorded_pass_s=0.1, recorded_row_s=0.001)
    assert BreakEven().refusal(ahead, recorded) is None
    assert recorded.full_pass_s(1000) == costs.full_pass_s(1000)
    assert recorded.partial_pass_s(0) == 0


def test_loading_beside_passes_is_not_added_to_their_time() -> None:
    """The link of a GPU copies while a probe runs; rows wait for both."""
    costs = Costs(pass_s=0.1, row_s=0.001, load_s=0.0005, recorded_rows=512, recorded_pass_s=0.01, recorded_row_s=0.001)
    ahead = PrefillEstimate(1000, stored_tokens=900, selected_tokens=90, probe_rows=32, probe_share=1.0)
    loading, probe, rows = 0.45, 0.01 + 0.032, 0.01 + 0.19
    assert predict_fused_s(ahead, costs) == pytest.approx(loading + probe + rows)
    beside = replace(costs, loading_overlaps=True)
    assert predict_fused_s(ahead, beside) == pytest.approx(loading + rows)
    assert predict_fused_s(ahead, replace(beside, load_s=1e-6)) == pytest.approx(probe + rows)
    assert predict_fused_s(replace(ahead, probe_rows=0), beside) == pytest.approx(loading)
    assert BreakEven().refusal(ahead, replace(costs, load_s=0.0009)) is not None
    assert BreakEven().refusal(ahead, replace(beside, load_s=0.0008)) is None


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("probe_rows", [0, 32])
def test_overhead_is_added_to_fused_prefills_alone(probe_rows: int, aside: bool) -> None:
    """So a prompt that takes a small model no longer than the host's work is computed in full."""
    costs = Costs(
        pass_s=0.01, row_s=1e-5, load_s=1e-6, recorded_rows=512, recorded_pass_s=0.001, loading_overlaps=aside
    )
    ahead = PrefillEstimate(1000, stored_tokens=900, selected_tokens=45, probe_rows=probe_rows, probe_share=1.0)
    slower = replace(costs, overhead_s=0.02)
    assert predict_fused_s(ahead, slower) == pytest.approx(predict_fused_s(ahead, costs) + 0.02)
    assert slower.full_pass_s(1000) == costs.full_pass_s(1000)
    assert BreakEven().refusal(ahead, costs) is None
    assert BreakEven().refusal(ahead, slower) is not None


def test_reports_name_the_prediction_for_what_was_done(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt, never = engine.prompt(QUESTION, PASSAGES), BreakEven(margin=1e-9)
    ahead = plan_lookups(engine.lm, engine.store, prompt, guarded()).estimate
    runner = loading_first(engine.lm, engine.store, costs=lambda: FAST)
    fused = prefill(runner, prompt, replace(guarded(), guard=BreakEven(margin=1e9))).report
    assert fused.predicted_s == predict_fused_s(ahead, FAST)
    full = prefill(runner, prompt, replace(guarded(), guard=never)).report
    assert full.predicted_s == FAST.full_pass_s(len(prompt))
    assert full.to_dict()["predicted_s"] == full.predicted_s
    assert prefill(runner, prompt, replace(guarded(), guard=None)).report.predicted_s is None


def test_loading_is_timed_from_disk_and_from_memory(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in memory at the moment; a passage that is not there is copied there first."""
    opened, copied = list[str](), list[ChunkKV]()
    for kind in (MemoryStore, DiskStore):
        own = kind.open
        monkeypatch.setattr(kind, "open", lambda store, at, own=own: (opened.append(store.kind), own(store, at))[1])
    copy_of = MemoryStore.copy_of
    copies = list[weakref.ref[object]]()

    def watched_copy(store: MemoryStore, chunk: ChunkKV) -> ChunkKV:
        copied.append(chunk)
        assert all(copy() is not None for copy in copies), "memory that a copy has left would be page-locked already"
        copy = copy_of(store, chunk)
        copies.append(weakref.ref(copy.blocks))
        return copy

    monkeypatch.setattr(MemoryStore, "copy_of", watched_copy)
    with DiskStore(tmp_path) as far:
        make_engine(llama, far).warm(PASSAGES, bases=(FRAMED,))
        alone = measure_loading(llama, far, TransferOpener(llama))
        assert alone is not None
        assert alone.far_s == alone.near_s > 0
        store = TieredStore(MemoryStore(), far)
        for _ in range(2):
            opened.clear(), copied.clear(), copies.clear()
            found = measure_loading(llama, store, TransferOpener(llama))
            assert found is not None
            assert found.far_s > found.near_s > 0
            assert set(opened) == {far.kind}
            assert len(copied) == len(PASSAGES)
            assert store.near.stats()[0].entries == 0
            assert [copy() for copy in copies] == [None] * len(PASSAGES), "copies are dropped"


def test_passages_on_disk_are_copied_to_memory_where_fusing_pays_only_from_there(
    llama: LanguageModel, tmp_path: Path
) -> None:
    """After a restart nothing is in memory. On a fast GPU a prompt could otherwise never be fused again."""
    costs = replace(FAST, load_s=1.0, near_load_s=1e-9)
    with DiskStore(tmp_path) as disk:
        make_engine(llama, disk).warm(PASSAGES, bases=(FRAMED,))
        with TieredStore(MemoryStore(), DiskStore(tmp_path)) as store:
            engine = make_engine(llama, store)
            runner, prompt = loading_first(llama, store, costs=lambda: costs), engine.prompt(QUESTION, PASSAGES)
            first = prefill(runner, prompt, guarded()).report
            assert "are being copied there" in str(first.fallback)
            assert first.rows == len(prompt)
            deadline = time.monotonic() + 30
            while plan_lookups(llama, store, prompt, guarded()).far_keys and time.monotonic() < deadline:
                time.sleep(0.01)
            second = prefill(runner, prompt, guarded()).report
            assert second.fallback is None
            assert second.rows < len(prompt)
            slow = loading_first(llama, store, costs=lambda: replace(costs, near_load_s=1.0))
            assert "copied" not in str(prefill(slow, prompt, guarded()).report.fallback)


def test_passages_that_do_not_fit_in_memory_are_not_copied_there(llama: LanguageModel, tmp_path: Path) -> None:
    """They would push each other out at every request."""
    costs = replace(FAST, load_s=1.0, near_load_s=1e-9)
    with DiskStore(tmp_path) as disk, TieredStore(MemoryStore(1 << 10), disk) as store:
        make_engine(llama, disk).warm(PASSAGES, bases=(FRAMED,))
        engine = make_engine(llama, store)
        runner = loading_first(llama, store, costs=lambda: costs)
        report = prefill(runner, engine.prompt(QUESTION, PASSAGES), guarded()).report
        assert str(report.fallback).startswith("computed in full")
        assert "copied" not in str(report.fallback)


def test_a_store_that_cannot_copy_fails_no_request(llama: LanguageModel, tmp_path: Path) -> None:
    class Refusing(TieredStore):
        def prefetch(self, keys: object) -> None:
            raise RuntimeError("cannot schedule new futures after shutdown")

    costs = replace(FAST, load_s=1.0, near_load_s=1e-9)
    with DiskStore(tmp_path) as disk, Refusing(MemoryStore(), disk) as store:
        make_engine(llama, disk).warm(PASSAGES, bases=(FRAMED,))
        engine = make_engine(llama, store)
        runner = loading_first(llama, store, costs=lambda: costs)
        report = prefill(runner, engine.prompt(QUESTION, PASSAGES), guarded()).report
        assert report.rows == report.prompt_tokens
        assert "copied" not in str(report.fallback)


def test_costs_of_a_store_with_a_tier_in_memory_are_not_those_of_its_disk_alone(
    llama: LanguageModel, tmp_path: Path
) -> None:
    with DiskStore(tmp_path) as disk, TieredStore(MemoryStore(), DiskStore(tmp_path)) as tiered:
        paths = {costs_path(llama, store) for store in (disk, tiered)}
    assert len(paths) == 2


def test_a_damaged_passage_is_left_out_of_the_timing(llama: LanguageModel) -> None:
    class Damaged(MemoryStore):
        def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
            opened = super().open(address)
            first = address == next(iter(self.entries())).address
            return (opened[0], damaged(opened[1], "key.1")) if first and isinstance(opened, tuple) else opened

    store = Damaged()
    make_engine(llama, store).warm(PASSAGES, bases=(FRAMED,))
    assert measure_loading(llama, store, TransferOpener(llama)) is not None


def test_a_margin_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="margin must be above 0"):
        BreakEven(0.0)


def test_costs_outlive_a_restart_and_a_damaged_file_is_measured_anew(
    llama: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore(tmp_path) as store:
        engine = make_engine(llama, store)
        engine.warm(PASSAGES, bases=(FRAMED,))
        first = engine.runner.costs()
    [path] = tmp_path.glob("costs-*.json")
    seams.passes_take(monkeypatch, lambda rows: 100.0 + rows)
    with DiskStore(tmp_path) as store:
        assert make_engine(llama, store).runner.costs() == first
        path.write_text("{")
        anew = make_engine(llama, store).runner.costs()
    assert (anew.pass_s, anew.row_s) == (pytest.approx(100), pytest.approx(1))
    assert read_costs(path) == anew


class Unlisted(MemoryStore):
    """A store that cannot say what it has, as a remote that is away."""

    def entries(self) -> Iterator[EntryInfo]:
        raise StoreError("the remote cannot be reached")


def test_a_store_that_cannot_be_listed_costs_no_answer(llama: LanguageModel) -> None:
    engine = FusionEngine(llama, Unlisted(), method=guarded())
    engine.warm(PASSAGES, bases=(FRAMED,))
    assert measure_loading(llama, engine.store, TransferOpener(llama)) is None
    assert engine.runner.costs().load_s == 0, "nothing could be timed"
    prompt = engine.prompt(QUESTION, PASSAGES)
    done = engine.prefill(prompt)
    same = make_method("full") if done.report.base is None else guarded().unguarded
    assert torch.allclose(done.logits, engine.prefill(prompt, method=same).logits, atol=1e-4)
