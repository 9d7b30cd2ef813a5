"""Many requests on one engine: each gets the answer it would get alone, whatever the others do."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import (
    FusionEngine,
    LanguageModel,
    MemoryStore,
    Prompt,
    SamplingParams,
    Scheduler,
    SchedulerSettings,
    make_method,
)
from qcfuse_rag.errors import Busy, Closed, PromptTooLong
from qcfuse_rag.fusion.recompute import Pause
from qcfuse_rag.runtime.decode_step import forward_step
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.graphs import decode_graphs as step_graph
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.prefill_base import FRAMED
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

LONG = SamplingParams(max_new_tokens=60)


@pytest.fixture
def engine(engine: FusionEngine) -> FusionEngine:
    engine.warm(PASSAGES)
    return engine


@pytest.fixture
def scheduler(engine: FusionEngine) -> Iterator[Scheduler]:
    one = Scheduler(engine, SchedulerSettings(active=4, waiting=3))
    yield one
    one.close(drain=False)


def prompts(engine: FusionEngine) -> list[Prompt]:
    """Of different lengths, so that requests stand at different positions."""
    return [engine.prompt(QUESTION, PASSAGES[:n]) for n in (0, 1, 2, 3)] + [engine.prompt("Why?", PASSAGES)]


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_step_of_several_requests_is_a_step_of_each(family_name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_engine(LanguageModel.wrap(build_model(family_name), tokenizer), MemoryStore())
    engine.warm(PASSAGES)
    lm = engine.lm
    given = [engine.prefill(prompt, answer_tokens=2) for prompt in prompts(engine)]
    alone = [engine.prefill(prompt, answer_tokens=2) for prompt in prompts(engine)]
    tokens = [int(one.logits.argmax()) for one in given]
    positions = [len(one.prompt) for one in given]
    together = forward_step(lm, tokens, positions, [one.buffer for one in given])
    for one, token, position, logits in zip(alone, tokens, positions, together, strict=True):
        plan = RowsPlan.of(torch.tensor([position]), lm.sliding)
        expected = forward_rows(lm, torch.tensor([token]), plan, one.buffer)
        assert float((logits - expected).abs().max()) < 1e-4
        for ours, theirs in zip(given[alone.index(one)].buffer.keys, one.buffer.keys, strict=True):
            assert float((ours[:, :, position] - theirs[:, :, position]).abs().max()) < 1e-4


def test_each_gets_the_answer_it_would_get_alone(engine: FusionEngine) -> None:
    given = prompts(engine)
    params = [SamplingParams(max_new_tokens=4 + 5 * index) for index in range(len(given))]
    params[2] = SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)
    alone = [engine.generate(prompt, own) for prompt, own in zip(given, params, strict=True)]
    with Scheduler(engine, SchedulerSettings(active=3)) as scheduler:
        answers = [scheduler.submit(prompt, own) for prompt, own in zip(given, params, strict=True)]
        for answer, expected in zip(answers, alone, strict=True):
            found = answer.result(timeout=60)
            assert (found.ids, found.text, found.finish_reason) == (
                expected.ids,
                expected.text,
                expected.finish_reason,
            )
            assert found.report.selected == expected.report.selected
            assert "".join(answer) == expected.text


def test_stop_strings_end_an_answer(engine: FusionEngine, scheduler: Scheduler) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    text = engine.generate(prompt, LONG).text
    params = SamplingParams(max_new_tokens=60, stop=(text[8:11],))
    expected = engine.generate(prompt, params)
    found = scheduler.submit(prompt, params).result(60)
    assert (found.text, found.finish_reason) == (expected.text, "stop")


def test_pieces_come_while_the_answer_is_made(engine: FusionEngine, scheduler: Scheduler) -> None:
    answer = scheduler.submit(engine.prompt(QUESTION, PASSAGES), LONG)
    first = next(answer)
    assert answer.generation is None or len(answer.generation.text) > len(first)
    assert first + "".join(answer) == answer.result().text
    assert list(answer) == [], "and nothing after the end"


async def test_event_loops_read_without_being_blocked(engine: FusionEngine, scheduler: Scheduler) -> None:
    async def read(prompt: Prompt) -> str:
        return "".join([piece async for piece in scheduler.submit(prompt, SamplingParams(max_new_tokens=12))])

    some = prompts(engine)[:3]
    texts = await asyncio.gather(*(read(prompt) for prompt in some))
    assert texts == [engine.generate(prompt, SamplingParams(max_new_tokens=12)).text for prompt in some]


async def test_leaving_an_async_for_cancels(engine: FusionEngine, scheduler: Scheduler) -> None:
    answer = scheduler.submit(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=200))
    pieces = aiter(answer)
    await anext(pieces)
    await pieces.aclose()  # type: ignore[attr-defined]
    found = await asyncio.to_thread(answer.result, 20)
    assert found.finish_reason == "cancelled"
    assert len(found.ids) < 200


def test_a_closed_event_loop_ends_its_request_and_no_other(engine: FusionEngine, scheduler: Scheduler) -> None:
    answer = scheduler.submit(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=200))
    loop = asyncio.new_event_loop()
    pieces = aiter(answer)
    loop.run_until_complete(anext(pieces))  # type: ignore[arg-type]
    loop.close()
    assert answer.result(20).finish_reason == "cancelled"
    assert scheduler.submit(engine.prompt("Why?", PASSAGES), LONG).result(20).ids


def test_cancelling_frees_the_buffer_and_leaves_the_others(engine: FusionEngine, scheduler: Scheduler) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    other = scheduler.submit(engine.prompt("Why?", PASSAGES), LONG)
    answer = scheduler.submit(prompt, SamplingParams(max_new_tokens=200))
    next(answer)
    held = weakref.ref(answer.decoder.buffer.keys[0])
    answer.cancel()
    assert answer.result(20).finish_reason == "cancelled"
    wait_until(lambda: gc.collect() is not None and held() is None)
    assert other.result(20).ids == engine.generate(engine.prompt("Why?", PASSAGES), LONG).ids


def test_an_error_is_its_readers_alone(
    engine: FusionEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, bad = engine.prefill, engine.prompt("Why?", PASSAGES)

    def failing(prompt: Prompt, **rest: Any) -> Any:
        if prompt is bad:
            raise OSError("the disk is gone")
        return prefill(prompt, **rest)

    monkeypatch.setattr(engine, "prefill", failing)
    good = scheduler.submit(engine.prompt(QUESTION, PASSAGES), LONG)
    wrong = scheduler.submit(bad, LONG)
    with pytest.raises(OSError, match="the disk is gone"):
        wrong.result(20)
    with pytest.raises(OSError, match="the disk is gone"):
        list(wrong)
    assert good.result(20).ids


def test_a_failed_step_ends_only_the_answers_it_fails_for(
    engine: FusionEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails for several is tried for each; what the error held is let go of."""
    good, bad = engine.prompt(QUESTION, PASSAGES), engine.prompt("Why?", PASSAGES[:1])

    def failing(lm: Any, tokens: Any, positions: list[int], buffers: Any) -> Any:
        if any(len(bad) <= position < len(bad) + 60 for position in positions):
            raise RuntimeError("out of memory")
        return forward_step(lm, tokens, positions, buffers)

    assert len(bad) + 60 <= len(good) or len(good) + 60 <= len(bad)
    monkeypatch.setattr(step_graph, "forward_step", failing)
    with scheduler._changed:
        first, wrong = scheduler.submit(good, LONG), scheduler.submit(bad, LONG)
    with pytest.raises(RuntimeError, match="out of memory"):
        wrong.result(20)
    assert wrong._decoder is None
    monkeypatch.undo()
    assert first.result(20).ids == engine.generate(good, LONG).ids


def test_a_request_that_was_cancelled_while_waiting_ends_soon(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    with Scheduler(engine, SchedulerSettings(active=1)) as scheduler:
        first = scheduler.submit(prompt, SamplingParams(max_new_tokens=200))
        next(first)
        waiting = [scheduler.submit(prompt, LONG) for _ in range(2)]
        waiting[1].cancel()
        with pytest.raises(CancelledError):
            waiting[1].result(20)
        assert first.generation is None, "and not only when its turn comes"
        first.cancel()


def test_a_full_queue_refuses(engine: FusionEngine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    held, prefill = threading.Event(), engine.prefill

    def slow(prompt: Prompt, **rest: Any) -> Any:
        assert held.wait(20)
        return prefill(prompt, **rest)

    monkeypatch.setattr(engine, "prefill", slow)
    prompt = engine.prompt(QUESTION, PASSAGES)
    first = scheduler.submit(prompt, LONG)
    wait_until(lambda: scheduler.waiting == 0)
    waiting = [scheduler.submit(prompt, LONG) for _ in range(3)]
    with pytest.raises(Busy, match="3 requests are waiting already"):
        scheduler.submit(prompt, LONG)
    waiting[1].cancel()
    late = scheduler.submit(prompt, LONG)  # what was cancelled makes room
    held.set()
    with pytest.raises(CancelledError):
        waiting[1].result(20)
    assert len({one.result(20).ids for one in (first, waiting[0], waiting[2], late)}) == 1


def test_what_cannot_fit_is_refused_at_once(engine: FusionEngine, scheduler: Scheduler) -> None:
    with pytest.raises(PromptTooLong):
        scheduler.submit(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=100_000))


def test_requests_are_taken_in_turn_with_steps_between_them(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst of questions slows the first answer, and does not stop it."""
    events: list[str] = []
    prefill = engine.prefill
    given = [engine.prompt(str(index), PASSAGES[:1]) for index in range(4)]

    def noted(prompt: Prompt, **rest: Any) -> Any:
        events.append(f"prefill {given.index(prompt)}")
        return prefill(prompt, **rest)

    def stepped(*rest: Any) -> Any:
        events.append("step")
        return forward_step(*rest)

    monkeypatch.setattr(engine, "prefill", noted)
    monkeypatch.setattr(step_graph, "forward_step", stepped)
    with Scheduler(engine, SchedulerSettings(active=8, steps=3)) as scheduler:
        with scheduler._changed:  # so that none is taken before all are there
            answers = [scheduler.submit(prompt, SamplingParams(max_new_tokens=30)) for prompt in given]
        for answer in answers:
            answer.result(20)
    assert [one for one in events if one != "step"] == [f"prefill {index}" for index in range(4)]
    places = [place for place, one in enumerate(events) if one != "step"]
    assert [b - a for a, b in pairwise(places)] == [4, 4, 4]


@pytest.mark.parametrize("method", ["full", "qcfuse", "cacheblend"])
def test_a_prefill_in_parts_is_the_prefill(family: LanguageModel, method: str) -> None:
    engine, pauses = make_engine(family, MemoryStore()), []
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, PASSAGES)
    chosen = make_method(method) if method == "full" else make_method(method, ratio=0.5, base=FRAMED)
    whole = engine.prefill(prompt, method=chosen)
    parts = engine.prefill(prompt, method=chosen, pause=Pause(7, lambda: pauses.append(None)))
    assert torch.allclose(whole.logits, parts.logits, atol=1e-4)
    assert whole.report.selected == parts.report.selected
    assert whole.report.row_layers == parts.report.row_layers
    # a pass that is steered between layers is one pass
    assert len(pauses) == (0 if method == "cacheblend" else (whole.report.rows - 1) // 7)


def test_answers_go_on_while_a_long_prompt_is_prefilled(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilling, steps_meanwhile = threading.Event(), []

    def prefill(*given: Any, **rest: Any) -> Any:
        prefilling.set()
        try:
            return plain(*given, **rest)
        finally:
            prefilling.clear()

    def step(*given: Any) -> Any:
        if prefilling.is_set():
            steps_meanwhile.append(given)
        return forward_step(*given)

    plain = engine.prefill
    monkeypatch.setattr(engine, "prefill", prefill)
    monkeypatch.setattr(step_graph, "forward_step", step)
    first, second = engine.prompt(QUESTION, PASSAGES[:1]), engine.prompt(QUESTION, PASSAGES)
    full = make_method("full")
    expected = [engine.generate(one, LONG, method=full).ids for one in (first, second)]
    with Scheduler(engine, SchedulerSettings(rows=16)) as scheduler:
        answers = [scheduler.submit(one, LONG, method=full) for one in (first, second)]
        found = [answer.result(timeout=60).ids for answer in answers]
    assert found == expected
    assert len(steps_meanwhile) == (len(second) - 1) // 16


def test_active_requests_share_a_bound_of_bytes(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    one = (len(prompt) + LONG.max_new_tokens) * engine.lm.kv_bytes_per_token
    most = 0
    with Scheduler(engine, SchedulerSettings(kv_bytes=2 * one)) as scheduler:
        answers = [scheduler.submit(prompt, LONG) for _ in range(5)]
        while any(answer.generation is None for answer in answers):
            most = max(most, scheduler.active)
        assert most == 2
    with Scheduler(engine, SchedulerSettings(kv_bytes=1)) as scheduler:
        assert scheduler.submit(prompt, LONG).result(20).ids, "alone it may be larger"


def test_closing_answers_what_was_submitted_or_cancels_it(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    scheduler = Scheduler(engine)
    answers = [scheduler.submit(prompt, LONG) for _ in range(3)]
    scheduler.close()
    assert all(answer.generation is not None for answer in answers)
    with pytest.raises(RuntimeError, match="closed"):
        scheduler.submit(prompt, LONG)
    scheduler = Scheduler(engine)
    answer = scheduler.submit(prompt, SamplingParams(max_new_tokens=200))
    next(answer)
    scheduler.close(drain=False)
    with pytest.raises(Closed, match="before the answer was whole"):
        answer.result()
    with pytest.raises(Closed):
        "".join(answer)


def test_what_its_reader_has_cancelled_is_no_error_when_the_scheduler_closes(engine: FusionEngine) -> None:
    scheduler = Scheduler(engine)
    answer = scheduler.submit(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=200))
    next(answer)
    answer.cancel()
    scheduler.close(drain=False)
    assert answer.result().finish_reason == "cancelled"


def test_closing_cancels_what_is_just_being_prefilled(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, plain = threading.Event(), threading.Event(), engine.prefill

    def prefill(*given: Any, **rest: Any) -> Any:
        begun.set()
        go_on.wait(10)
        return plain(*given, **rest)

    monkeypatch.setattr(engine, "prefill", prefill)
    scheduler = Scheduler(engine)
    answer = scheduler.submit(engine.prompt(QUESTION, PASSAGES), LONG)
    assert begun.wait(10)
    scheduler.close(drain=False, wait=False)
    go_on.set()
    with pytest.raises(Closed):
        answer.result(20)


def test_methods_are_each_requests_own(engine: FusionEngine, scheduler: Scheduler) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    full = scheduler.submit(prompt, LONG, method=make_method("full"))
    fused = scheduler.submit(prompt, LONG)
    assert full.result(20).report.method == "full"
    assert fused.result(20).report.method == "qcfuse"


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1"):
        SchedulerSettings(steps=0)
