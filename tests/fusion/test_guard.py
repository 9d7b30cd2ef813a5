"""When not to fuse: never slower than full prefill, by prediction."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qcfuse_rag import DiskStore, FusionEngine, LanguageModel, MemoryStore, SamplingParams, TieredStore, make_method
from qcfuse_rag.fusion.lookup import plan_lookups
from qcfuse_rag.fusion.method import BreakEven, Method
from qcfuse_rag.fusion.pipeline import Prefilled, fuse_prompt
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.runtime.cost import Costs, PrefillEstimate
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.store.key import FRAMED
from tests.support.engines import loading_first, look_up, make_engine
from tests.support.passages import PASSAGES, QUESTION

FAST = Costs(pass_s=0.01, row_s=0.001, load_s=1e-6)
DEAR = replace(FAST, load_s=0.1)
LONG = PrefillEstimate(prompt_tokens=2000, stored_tokens=1950, selected_tokens=100, probe_rows=50, probe_share=0.5)


def guarded(ratio: float = 0.1) -> Method:
    return replace(make_method("qcfuse", ratio=ratio, base=FRAMED), guard=BreakEven())


def ask(engine: FusionEngine, costs: Costs, method: Method | None = None, texts: list[str] = PASSAGES) -> Prefilled:
    """Prefill under a guard that knows these costs."""
    runner = loading_first(engine.lm, engine.store, costs=costs)
    return fuse_prompt(runner, engine.prompt(QUESTION, texts), method or guarded())


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


def test_the_rows_of_a_probe_are_predicted_with_the_history_in_front_of_the_passages(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt = engine.prompt(QUESTION, PASSAGES, [("user", QUESTION), ("assistant", "Nobody knows.")])
    fused = FusedPrompt.empty(engine.runner, prompt, len(prompt))
    method = make_method("auto", base=FRAMED, ratio=0.5, exact_first=False, guard=False)
    fused.load(look_up(engine.lm, engine.store, prompt, method), WaitBudget(None))
    rows = fused.probe_rows(suffix=True)
    assert int(rows[0]) < prompt.chunks[0].start, "the history is in front of the passages"
    assert plan_lookups(engine.lm, engine.store, prompt, method).estimate.probe_rows == len(rows)


def test_a_refused_prompt_is_computed_in_full_and_says_why(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt, done = engine.prompt(QUESTION, PASSAGES), ask(engine, DEAR, guarded(ratio=1.0))
    exact = engine.prefill(prompt, method=make_method("full"))
    assert torch.allclose(done.logits, exact.logits, atol=1e-4)
    assert done.report.method == "qcfuse"
    assert done.report.base is None
    assert str(done.report.fallback).startswith("computed in full, ")
    assert done.report.rows == len(prompt)


def test_a_prompt_without_any_stored_passage_says_that_and_is_not_the_guards(engine: FusionEngine) -> None:
    """Its system prefix is stored wherever anything was ever warmed, and saves next to nothing."""
    engine.warm(PASSAGES[:1], bases=(FRAMED,))
    report = ask(engine, DEAR, texts=PASSAGES[1:]).report
    assert report.fallback == "2 of 2 passages computed in full: absent"
    assert [lookup.hit for lookup in report.lookups if lookup.role == "chunk"] == [False, False]


def test_a_guards_reason_names_what_was_absent_besides(engine: FusionEngine) -> None:
    engine.warm(PASSAGES[:1], bases=(FRAMED,))
    report = ask(engine, DEAR).report
    assert str(report.fallback).startswith("computed in full, ")
    assert str(report.fallback).endswith("; 2 of 3 passages are absent")


def test_a_prompt_is_fused_while_nothing_is_known(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    with MemoryStore() as store:
        make_engine(engine.lm, store).warm(PASSAGES, bases=(FRAMED,))
        runner = loading_first(engine.lm, store)
        first, second = (fuse_prompt(runner, prompt, guarded()).report for _ in range(2))
    assert (first.base, first.predicted_s) == ("framed", None)
    assert second.predicted_s is not None, "the first one has taught something"


@pytest.mark.parametrize(
    ("costs", "fused"),
    [(DEAR, [False, True, False, True]), (replace(DEAR, pass_s=10.0), [False] * 4)],
    ids=["loading is dear", "fusing never pays"],
)
def test_a_prompt_that_is_refused_for_loading_is_fused_now_and_then(
    costs: Costs, fused: list[bool], engine: FusionEngine
) -> None:
    """A wrong price of loading would stay for ever: only what is loaded can correct it."""
    engine.warm(PASSAGES, bases=(FRAMED,))
    runner = loading_first(engine.lm, engine.store, costs=costs)
    reports = [fuse_prompt(runner, engine.prompt(QUESTION, PASSAGES), guarded()).report for _ in fused]
    assert [report.base == "framed" for report in reports] == fused
    assert [report.fallback is None for report in reports] == fused


def test_a_store_that_is_tried_again_may_take_no_longer_than_full_prefill(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    get = engine.store.get
    monkeypatch.setattr(engine.store, "get", lambda key: (time.sleep(3), get(key))[1])
    runner = loading_first(engine.lm, engine.store, costs=DEAR)
    runner.costs.refusals = 1
    report = fuse_prompt(runner, engine.prompt(QUESTION, PASSAGES), guarded()).report
    assert report.rows == report.prompt_tokens
    assert "not there within" in str(report.fallback)


def test_reports_name_the_prediction_for_what_was_done(engine: FusionEngine) -> None:
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt = engine.prompt(QUESTION, PASSAGES)
    ahead = plan_lookups(engine.lm, engine.store, prompt, guarded()).estimate
    fused, full, unguarded = (
        ask(engine, FAST, replace(guarded(), guard=guard)).report
        for guard in (BreakEven(margin=1e9), BreakEven(margin=1e-9), None)
    )
    assert fused.predicted_s == FAST.fused_s(ahead)
    assert full.to_dict()["predicted_s"] == full.predicted_s == FAST.full_pass_s(len(prompt))
    assert unguarded.predicted_s is None


def test_passages_on_disk_are_copied_to_memory_where_fusing_pays_only_from_there(
    llama: LanguageModel, tmp_path: Path
) -> None:
    """After a restart nothing is in memory. On a fast GPU a prompt could otherwise never be fused again."""
    costs = replace(FAST, load_s=1.0, near_load_s=1e-9)
    with DiskStore(tmp_path) as disk:
        make_engine(llama, disk).warm(PASSAGES, bases=(FRAMED,))
        with TieredStore(MemoryStore(), DiskStore(tmp_path)) as store:
            engine = make_engine(llama, store)
            prompt, first = engine.prompt(QUESTION, PASSAGES), ask(engine, costs).report
            assert "are being copied there" in str(first.fallback)
            assert first.rows == len(prompt)
            deadline = time.monotonic() + 30
            while plan_lookups(llama, store, prompt, guarded()).far_keys and time.monotonic() < deadline:
                time.sleep(0.01)
            second = ask(engine, costs).report
            assert second.fallback is None
            assert second.rows < len(prompt)
            assert "copied" not in str(ask(engine, replace(costs, near_load_s=1.0)).report.fallback)


class Refusing(TieredStore):
    def prefetch(self, keys: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")


@pytest.mark.parametrize(("kind", "limit_bytes"), [(TieredStore, 1 << 10), (Refusing, 1 << 30)], ids=["full", "closed"])
def test_passages_that_memory_cannot_take_fail_no_request(
    kind: type[TieredStore], limit_bytes: int, llama: LanguageModel, tmp_path: Path
) -> None:
    """Those that do not fit would push each other out at every request."""
    with DiskStore(tmp_path) as disk, kind(MemoryStore(limit_bytes), disk) as store:
        make_engine(llama, disk).warm(PASSAGES, bases=(FRAMED,))
        report = ask(make_engine(llama, store), replace(FAST, load_s=1.0, near_load_s=1e-9)).report
        assert report.rows == report.prompt_tokens
        assert str(report.fallback).startswith("computed in full")
        assert "copied" not in str(report.fallback)


def test_a_margin_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="margin must be above 0"):
        BreakEven(0.0)


@pytest.mark.parametrize("factor", [1000.0, 1 / 1000], ids=["high", "low"])
def test_a_wrong_file_does_no_harm_after_five_questions(factor: float, llama: LanguageModel, tmp_path: Path) -> None:
    method = replace(guarded(), guard=BreakEven(margin=4.0))  # a tiny model's prompts hardly pay

    def costs_after(questions: int) -> Costs:
        with open_store(tmp_path) as store, make_engine(llama, store, method=method) as engine:
            engine.warm(PASSAGES, bases=(FRAMED,))
            for _ in range(questions):
                engine.generate(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=4))
            found = engine.runner.costs()
            assert found is not None
            return found

    right = costs_after(5)
    [file] = tmp_path.glob("costs-*.json")
    samples = [{**sample, "seconds": sample["seconds"] * factor} for sample in json.loads(file.read_text())]
    file.write_text(json.dumps(samples))
    wrong, corrected = costs_after(0), costs_after(5)
    asked = replace(LONG, prompt_tokens=270, stored_tokens=220, selected_tokens=20, near_tokens=220)
    for predict in (lambda costs: costs.full_pass_s(270), lambda costs: costs.fused_s(asked)):
        assert 1 / 15 < predict(wrong) / predict(right) / factor < 15, (
            "passes of a tiny model take what the machine likes"
        )
        assert 1 / 15 < predict(corrected) / predict(right) < 15
