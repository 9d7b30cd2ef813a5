"""Healing in a scheduler: each request gets the answer it would get alone, beside others that heal or do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from qcfuse_rag import FusionEngine, Prompt, SamplingParams, Scheduler, SchedulerSettings, make_method
from qcfuse_rag.fusion.healing import Healing
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.passages import PASSAGES, QUESTION

FULL, REUSE = make_method("full"), make_method("reuse")
FAST = SamplingParams(max_new_tokens=48)
EXACT = replace(FAST, fidelity="exact")


@pytest.fixture
def engine(engine: FusionEngine) -> FusionEngine:
    engine.warm(PASSAGES, bases=(BLIND, FRAMED))
    return engine


@pytest.fixture
def scheduler(engine: FusionEngine) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine, SchedulerSettings(active=4, rows=64))
    yield scheduler
    scheduler.close(drain=False)


def prompts(engine: FusionEngine) -> list[Prompt]:
    return [engine.prompt(question, PASSAGES) for question in (QUESTION, "Why?", "Who is the captain?", "When?")]


def broken(*arguments: Any, **settings: Any) -> Any:
    raise RuntimeError("the device is out of memory")


@pytest.mark.slow
def test_mixed_fidelities_are_each_what_they_would_be_alone(engine: FusionEngine, scheduler: Scheduler) -> None:
    asked = prompts(engine)
    settings = [EXACT, FAST, EXACT, replace(EXACT, max_new_tokens=9)]
    answers = [scheduler.submit(prompt, params, method=REUSE) for prompt, params in zip(asked, settings, strict=True)]
    finished = [answer.result(60) for answer in answers]
    for prompt, params, answer in zip(asked, settings, finished, strict=True):
        plain = replace(params, fidelity="fast")
        if params.fidelity == "exact":
            expected = engine.generate(prompt, plain, method=FULL)
            assert answer.verified_upto == len(answer.ids)
        else:
            expected = engine.generate(prompt, plain, method=REUSE)
        assert (answer.ids, answer.text) == (expected.ids, expected.text)
    for answer, result in zip(answers, finished, strict=True):
        assert "".join(answer) == result.text
        assert answer.verified_upto == result.verified_upto


def test_one_request_heals_in_the_passes_of_its_steps(engine: FusionEngine, scheduler: Scheduler) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    expected = engine.generate(prompt, EXACT, method=REUSE)
    answer = scheduler.submit(prompt, EXACT, method=REUSE).result(60)
    assert (answer.ids, answer.healing, answer.passes) == (expected.ids, expected.healing, expected.passes)
    assert answer.healing is not None
    assert answer.healing.exact_tokens == len(prompt)


def test_an_answer_that_cannot_begin_fails_alone(
    engine: FusionEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Healing, "__init__", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            scheduler.submit(engine.prompt(QUESTION, PASSAGES), EXACT, method=REUSE).result(60)
    assert scheduler.alive
    assert scheduler.submit(engine.prompt(QUESTION, PASSAGES), FAST).result(60).ids


@pytest.mark.slow
@pytest.mark.parametrize("beside", [0, 1])
def test_a_cancelled_request_stops_healing(
    engine: FusionEngine, scheduler: Scheduler, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [scheduler.submit(engine.prompt("Why?", PASSAGES), FAST) for _ in range(beside)]
    passes: list[int] = []
    compute = Healing._compute

    def slow(healing: Healing, *arguments: Any, **settings: Any) -> Any:
        passes.append(healing.healed)
        time.sleep(0.05)
        return compute(healing, *arguments, **settings)

    monkeypatch.setattr(Healing, "_compute", slow)
    answer = scheduler.submit(engine.prompt(QUESTION, PASSAGES), EXACT, method=REUSE)
    while not passes:
        time.sleep(0.002)
    answer.cancel()
    result = answer.result(20)
    assert (result.text, result.finish_reason) == ("", "cancelled")
    done = len(passes)
    time.sleep(0.2)
    assert len(passes) == done
    assert all(other.result(60).ids for other in others)


@pytest.mark.slow
def test_an_exact_request_that_cannot_be_computed_at_all_fails_alone(
    engine: FusionEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = scheduler.submit(engine.prompt("Why?", PASSAGES), FAST)
    for name in ("_compute", "restart"):
        monkeypatch.setattr(Healing, name, broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.submit(engine.prompt(QUESTION, PASSAGES), EXACT, method=REUSE).result(60)
    assert other.result(60).ids == engine.generate(other.prompt, FAST).ids
