"""Shadow mode compares a sample of the requests with full prefill along its answer, and keeps numbers only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, SamplingParams, ShadowSettings, make_method
from qcfuse_rag.runtime.residuals import ResidualKernel
from qcfuse_rag.store.key import FRAMED
from qcfuse_rag.verification.divergence import divergence
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

QCFUSE = make_method("qcfuse", ratio=0.1, base=FRAMED)
REUSE = make_method("reuse", base=FRAMED)
FULL = make_method("full")


@pytest.fixture
def served(llama: LanguageModel) -> Iterator[FusionEngine]:
    engine = make_warmed_engine(llama, method=QCFUSE)
    yield engine
    engine.close()


def ask(engine: FusionEngine, times: int) -> None:
    for _ in range(times):
        engine.prefill(engine.prompt(QUESTION, PASSAGES))


def test_one_in_so_many_requests_is_compared_with_full_prefill(served: FusionEngine) -> None:
    shadow = served.watch(ShadowSettings(every=3, most_waiting=10))
    ask(served, 7)
    assert shadow.wait(30)
    drift = shadow.drift()
    assert (drift.requests, drift.compared, drift.dropped) == (7, 2, 0)
    assert not drift.sustained
    before = served.watch(ShadowSettings()).drift()
    assert (before.kl, before.agreement, before.identical) == (None, None, None)


@pytest.mark.slow
def test_drift_is_measured_along_full_prefills_answer(served: FusionEngine) -> None:
    tokens, figures = 5, []
    shadow = served.watch(ShadowSettings(every=1, most_waiting=10, answer_tokens=tokens))
    for question in (QUESTION, "Who?", "Where?"):
        prompt = served.prompt(question, PASSAGES)
        served.prefill(prompt)
        params = SamplingParams(max_new_tokens=tokens)
        exact, own = (served.generate(prompt, params, method=method).ids for method in (FULL, QCFUSE))
        fused = served.prefill(prompt, method=QCFUSE, answer_tokens=tokens)
        logits = [fused.logits]
        for index, token in enumerate(exact[:-1]):
            logits.append(served.runner.decodes([token], [len(prompt) + index], [fused.buffer])[0])
        with torch.inference_mode():
            plain = served.lm.model(torch.tensor([[*prompt.ids, *exact]])).logits[0, len(prompt) - 1 : -1].float()
        kl = fmean(divergence(mine, other) for mine, other in zip(plain, logits, strict=True))
        agreement = fmean(int(row.argmax()) == token for row, token in zip(logits, exact, strict=True))
        figures.append((kl, agreement, float(own == exact)))
    assert shadow.wait(30)
    drift, (kl, agreement, identical) = shadow.drift(), map(fmean, zip(*figures, strict=True))
    assert kl > 0
    assert drift.kl == pytest.approx(kl, rel=1e-2)
    assert (drift.agreement, drift.identical) == (pytest.approx(agreement), pytest.approx(identical))


def test_a_prompt_that_fills_the_window_is_compared_at_its_first_token(served: FusionEngine) -> None:
    shadow = served.watch(ShadowSettings(every=1))
    window, length = served.lm.context_window.tokens, len(served.prompt("", PASSAGES))
    ids = served.lm.tokenizer.backend_tokenizer.encode("?" * (2 * window)).ids
    prompt = served.prompt("", PASSAGES)
    question = replace(prompt.segments[-1], ids=(*ids[: window - length], *prompt.segments[-1].ids))
    full = replace(prompt, segments=(*prompt.segments[:-1], question))
    assert len(full) == window
    served.prefill(full)
    assert shadow.wait(30)
    assert (shadow.drift().compared, shadow.drift().error) == (1, None)


def test_passages_that_were_removed_meanwhile_are_not_compared(served: FusionEngine) -> None:
    shadow = served.watch(ShadowSettings(every=1))
    with shadow.prefilling():
        ask(served, 1)
        served.store.clear()
    assert shadow.wait(30)
    drift = shadow.drift()
    assert (drift.compared, drift.dropped, drift.failed) == (0, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_drift", "limit", "windows", "ratio", "in_full"),
    [
        ("report", 0.0, 1, None, False),
        ("raise", 0.0, 1, 0.2, False),
        ("raise", 0.0, 3, 0.4, True),
        ("full", 0.0, 1, None, True),
        ("full", 1e9, 1, None, False),
    ],
)
def test_sustained_drift_is_answered(
    served: FusionEngine, on_drift: Any, limit: float, windows: int, ratio: float | None, in_full: bool
) -> None:
    shadow = served.watch(ShadowSettings(every=1, limit=limit, window=2, on_drift=on_drift, most_waiting=10))
    for done in range(2 * windows):
        ask(served, 1)
        assert shadow.wait(30)
        assert done or not shadow.drift().sustained, "half a window says nothing"
    drift = shadow.drift()
    assert drift.sustained == (limit == 0)
    assert (drift.ratio, drift.in_full) == (ratio, in_full)
    report = served.prefill(served.prompt(QUESTION, PASSAGES)).report
    assert report.base == (None if in_full else "framed")
    assert report.ratio == (1.0 if in_full else ratio or 0.1)


def test_a_raised_ratio_has_no_residuals(served: FusionEngine) -> None:
    """A verdict's residuals are for the verdict's own ratio only."""
    served.method = replace(QCFUSE, residuals=ResidualKernel())
    shadow = served.watch(ShadowSettings(every=1, limit=0.0, window=1, on_drift="raise"))
    ask(served, 1)
    assert shadow.wait(30)
    raised = shadow.method(served.method)
    assert (raised.ratio, raised.residuals) == (0.2, None)


def test_comparisons_wait_for_idle_time_and_too_many_are_dropped(served: FusionEngine) -> None:
    shadow = served.watch(ShadowSettings(every=1, most_waiting=2))
    with shadow.prefilling():
        ask(served, 4)
        assert shadow.drift().compared == 0
    assert shadow.wait(30)
    assert (shadow.drift().compared, shadow.drift().dropped) == (2, 2)


def test_requests_that_reuse_nothing_or_name_a_method_are_not_watched(served: FusionEngine) -> None:
    shadow = served.watch(ShadowSettings(every=1))
    served.prefill(served.prompt(QUESTION, PASSAGES), method=REUSE)
    served.prefill(served.prompt(QUESTION, []))
    served.prefill(served.prompt(QUESTION, ["A passage that nobody warmed."]))
    assert shadow.drift().requests == 0


def test_a_failing_comparison_does_not_end_the_watch(served: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    shadow = served.watch(ShadowSettings(every=1))
    with monkeypatch.context() as patch:
        patch.setattr("qcfuse_rag.verification.watch.fuse_prompt", fails)
        ask(served, 1)
        assert shadow.wait(30)
    ask(served, 1)
    assert shadow.wait(30)
    drift = shadow.drift()
    assert (drift.compared, drift.dropped, drift.failed) == (1, 0, 1)
    assert drift.error == "RuntimeError: out of memory"


def test_closing_ends_the_thread(served: FusionEngine) -> None:
    served.watch(ShadowSettings(every=1))
    assert any(thread.name == "qcfuse-shadow" for thread in threading.enumerate())
    served.close()
    assert not any(thread.name == "qcfuse-shadow" for thread in threading.enumerate())


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"window": 0}, {"most_waiting": 0}, {"answer_tokens": 0}, {"on_drift": "panic"}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ShadowSettings(**wrong)  # type: ignore[arg-type]
