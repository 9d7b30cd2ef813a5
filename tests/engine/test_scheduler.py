"""Many requests on one engine: each gets the answer it would get alone, whatever the others do."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import (
    FusionEngine,
    LanguageModel,
    Prompt,
    SamplingParams,
    Scheduler,
    SchedulerSettings,
    make_method,
)
from qcfuse_rag.engine import scheduler as scheduler_module
from qcfuse_rag.engine.scheduler import RequestHandle
from qcfuse_rag.errors import Busy, Closed, PromptTooLong
from qcfuse_rag.fusion.pipeline import Parts, Prefilled
from qcfuse_rag.runtime.forward import forward_rows, forward_step
from qcfuse_rag.runtime.graphs import runners as step_graph
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.key import FRAMED
from tests.support.engines import make_warmed_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

LONG = SamplingParams(max_new_tokens=60)


@pytest.fixture
def engine(engine: FusionEngine) -> FusionEngine:
    engine.warm(PASSAGES)
    return engine


@pytest.fixture
def scheduler(engine: FusionEngine) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine, SchedulerSettings(active=4, waiting=3))
    yield scheduler
    scheduler.close(drain=False)


def prompts(engine: FusionEngine) -> list[Prompt]:
    """Of different lengths, so that requests stand at different positions."""
    return [engine.prompt(QUESTION, PASSAGES[:n]) for n in (0, 1, 2, 3)] + [engine.prompt("Why?", PASSAGES)]


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_step_of_several_requests_is_a_step_of_each(family_name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_warmed_engine(LanguageModel.wrap(build_model(family_name), tokenizer))
    lm = engine.lm
    given = [engine.prefill(prompt, answer_tokens=2) for prompt in prompts(engine)]
    alone = [engine.prefill(prompt, answer_tokens=2) for prompt in prompts(engine)]
    tokens = [int(prefilled.logits.argmax()) for prefilled in given]
    positions = [len(prefilled.prompt) for prefilled in given]
    together = forward_step(lm, tokens, positions, [prefilled.buffer for prefilled in given])
    for prefilled, token, position, logits in zip(alone, tokens, positions, together, strict=True):
        plan = RowsPlan.of(torch.tensor([position]), lm.sliding)
        expected = forward_rows(lm, torch.tensor([token]), plan, prefilled.buffer)
        assert float((logits - expected).abs().max()) < 1e-4
        for ours, theirs in zip(given[alone.index(prefilled)].buffer.keys, prefilled.buffer.keys, strict=True):
            assert float((ours[:, :, position] - theirs[:, :, position]).abs().max()) < 1e-4


def test_each_gets_the_answer_it_would_get_alone(engine: FusionEngine) -> None:
    given = prompts(engine)
    params = [SamplingParams(max_new_tokens=4 + 5 * index) for index in range(len(given))]
    params[2] = SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)
    params[3] = replace(LONG, stop=(engine.generate(given[3], LONG).text[8:11],))
    alone = [engine.generate(prompt, own) for prompt, own in zip(given, params, strict=True)]
    assert alone[3].finish_reason == "stop"
    with Scheduler(engine, SchedulerSettings(active=3)) as scheduler:
        answers = [scheduler.submit(prompt, own) for prompt, own in zip(given, params, strict=True)]
        for answer, expected in zip(answers, alone, strict=True):
            found = answer.result(timeout=60)
            for name in ("ids", "text", "finish_reason"):
                assert getattr(found, name) == getattr(expected, name)
            assert found.report.selected == expected.report.selected
            assert "".join(answer) == expected.text


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
    prefill, bad = engine.prefill_in_parts, engine.prompt("Why?", PASSAGES)

    def failing(prompt: Prompt, **rest: Any) -> Any:
        if prompt is bad:
            raise OSError("the disk is gone")
        return (yield from prefill(prompt, **rest))

    monkeypatch.setattr(engine, "prefill_in_parts", failing)
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
    assert wrong.decoder is None
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


@pytest.fixture
def held(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold back every prefill until this is set."""
    held, plain = threading.Event(), engine.prefill_in_parts

    def prefill(*given: Any, **rest: Any) -> Any:
        assert held.wait(20)
        return (yield from plain(*given, **rest))

    monkeypatch.setattr(engine, "prefill_in_parts", prefill)
    return held


def test_a_full_queue_refuses(engine: FusionEngine, scheduler: Scheduler, held: threading.Event) -> None:
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
    assert len({request.result(20).ids for request in (first, waiting[0], waiting[2], late)}) == 1


def test_closing_cancels_what_is_just_being_prefilled(engine: FusionEngine, held: threading.Event) -> None:
    scheduler = Scheduler(engine)
    answer = scheduler.submit(engine.prompt(QUESTION, PASSAGES), LONG)
    wait_until(lambda: scheduler.waiting == 0)
    scheduler.close(drain=False, wait=False)
    held.set()
    with pytest.raises(Closed):
        answer.result(20)


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        (512, [1, 0, 1]),  # all are short: their first tokens come before further tokens of others
        (2, [3, 3, 3]),  # all need several parts
    ],
)
def test_requests_are_taken_in_turn_with_steps_between_them(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch, rows: int, steps: list[int]
) -> None:
    """A burst of questions slows the first answer, and does not stop it."""
    events: list[str] = []
    prefill = engine.prefill_in_parts
    given = [engine.prompt(str(index), PASSAGES[:1]) for index in range(4)]

    def noted(prompt: Prompt, **rest: Any) -> Any:
        events.append(f"prefill {given.index(prompt)}")
        return (yield from prefill(prompt, **{**rest, "part_rows": lambda: 512}))

    def stepped(*rest: Any) -> Any:
        events.append("step")
        return forward_step(*rest)

    monkeypatch.setattr(engine, "prefill_in_parts", noted)
    monkeypatch.setattr(step_graph, "forward_step", stepped)
    with Scheduler(engine, SchedulerSettings(active=8, steps=3, rows=rows)) as scheduler:
        with scheduler._changed:  # so that none is taken before all are there
            answers = [scheduler.submit(prompt, SamplingParams(max_new_tokens=30)) for prompt in given]
        for answer in answers:
            answer.result(20)
    assert [event for event in events if event != "step"] == [f"prefill {index}" for index in range(4)]
    places = [place for place, event in enumerate(events) if event != "step"]
    assert [b - a - 1 for a, b in pairwise(places)] == steps
    assert len(events) > places[-1] + 3, "and goes on when all have begun"


@pytest.mark.parametrize("method", ["full", "qcfuse", "cacheblend"])
def test_a_prefill_in_parts_is_the_prefill(family: LanguageModel, method: str) -> None:
    engine = make_warmed_engine(family)
    prompt = engine.prompt(QUESTION, PASSAGES)
    chosen = make_method(method) if method == "full" else make_method(method, ratio=0.5, base=FRAMED)
    whole = engine.prefill(prompt, method=chosen)
    left = list[int]()
    parts = computed_in_parts(engine.prefill_in_parts(prompt, method=chosen, part_rows=lambda: 7), left)
    assert torch.allclose(whole.logits, parts.logits, atol=1e-4)
    assert whole.report.selected == parts.report.selected
    assert whole.report.row_layers == parts.report.row_layers
    # a pass that is steered between layers is one pass
    assert left == ([] if method == "cacheblend" else list(range(whole.report.rows, 3, -7)))


def computed_in_parts(parts: Parts[Prefilled], left: list[int]) -> Prefilled:
    """Do all parts; note the numbers of rows left before each."""
    while True:
        try:
            left.append(next(parts))
        except StopIteration as finished:
            prefilled: Prefilled = finished.value
            return prefilled


def test_a_prompt_of_one_part_is_computed_in_the_pass_it_would_be_alone(engine: FusionEngine) -> None:
    """So that single answers are the same to the last bit, with a scheduler and without."""
    prompt = engine.prompt(QUESTION, PASSAGES)
    for method in (make_method("full"), make_method("qcfuse", ratio=0.5, base=FRAMED)):
        whole = engine.prefill(prompt, method=method)
        parts = computed_in_parts(engine.prefill_in_parts(prompt, method=method, part_rows=lambda: 512), [])
        assert torch.equal(whole.logits, parts.logits)
        assert all(map(torch.equal, whole.buffer.keys, parts.buffer.keys))


class Recorded:
    """Notes which prompt's rows are computed, part by part; parts have as many rows as `rows` says."""

    def __init__(self, engine: FusionEngine, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        self.parts: list[Prompt] = []
        self.closed: list[Prompt] = []
        self.pause: Callable[[Prompt], object] = lambda prompt: None
        plain = engine.prefill_in_parts

        def recorded(prompt: Prompt, **rest: Any) -> Any:
            parts = plain(prompt, **{**rest, "part_rows": lambda: rows})
            while True:
                self.pause(prompt)
                self.parts.append(prompt)
                try:
                    left = next(parts)
                except StopIteration as finished:
                    return finished.value
                try:
                    yield left
                except GeneratorExit:
                    self.closed.append(prompt)
                    raise

        monkeypatch.setattr(engine, "prefill_in_parts", recorded)


@pytest.mark.slow
def test_a_short_question_overtakes_a_long_prompt(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, full = Recorded(engine, monkeypatch, rows=8), make_method("full")
    long, short = engine.prompt(QUESTION, PASSAGES), engine.prompt("Why?")
    with Scheduler(engine, SchedulerSettings(rows=64, part_s=1e-6)) as scheduler:
        late: list[RequestHandle] = []

        def submit_in_the_middle(prompt: Prompt) -> None:
            if recorded.parts.count(long) == 3 and not late:
                late.append(scheduler.submit(short, LONG, method=full))

        recorded.pause = submit_in_the_middle
        scheduler.submit(long, LONG, method=full).result(60)
        late[0].result(60)
    since = recorded.parts[recorded.parts.index(short) :]
    assert recorded.parts.index(short) <= 8, "it waits for the part that is being computed and for few others"
    assert since.count(long) > since.count(short)
    last = max(index for index, prompt in enumerate(recorded.parts) if prompt is short)
    assert last - recorded.parts.index(short) < 2 * recorded.parts.count(short), "and then goes on"


def computed_together(
    engine: FusionEngine, recorded: Recorded, settings: SchedulerSettings, *prompts: Prompt
) -> list[Prompt]:
    """Submit prompts at once, none of which is taken before all are there; return whose parts were computed."""
    with Scheduler(engine, settings) as scheduler:
        with scheduler._changed:
            one_token = SamplingParams(max_new_tokens=1)
            answers = [scheduler.submit(prompt, one_token, method=make_method("full")) for prompt in prompts]
        for answer in answers:
            answer.result(60)
    return recorded.parts


def test_requests_of_one_part_go_in_the_order_of_submission(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a question of one word more would wait until nobody asks the shorter one."""
    recorded = Recorded(engine, monkeypatch, rows=512)
    given = [engine.prompt("Who keeps the key?"), *(engine.prompt("Why?") for _ in range(3))]
    assert len(given[0]) > len(given[1])
    assert computed_together(engine, recorded, SchedulerSettings(overtaken=100), *given) == given


@pytest.mark.slow
def test_nobody_is_overtaken_for_ever(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth part is the oldest request's, however many short ones wait."""
    recorded = Recorded(engine, monkeypatch, rows=16)
    long, shorts = engine.prompt(QUESTION, PASSAGES), [engine.prompt(f"{index}?") for index in range(40)]
    parts = computed_together(engine, recorded, SchedulerSettings(active=50, rows=64, part_s=1e-6), long, *shorts)
    assert [place + 1 for place, prompt in enumerate(parts) if prompt is long][:5] == [4, 8, 12, 16, 20]


def test_of_two_long_prompts_the_shorter_is_computed_first(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(engine, monkeypatch, rows=8)
    longer, shorter = engine.prompt(QUESTION, PASSAGES), engine.prompt(QUESTION, PASSAGES[:1])
    settings = SchedulerSettings(rows=64, part_s=1e-6, overtaken=100)
    parts = computed_together(engine, recorded, settings, longer, shorter)
    assert parts == sorted(parts, key=len)


def test_the_oldest_request_gets_room_though_smaller_ones_would_fit(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(engine, monkeypatch, rows=512)
    long, shorts = engine.prompt(QUESTION, PASSAGES), [engine.prompt(f"{index}?") for index in range(20)]
    limit = (len(long) + 10) * engine.lm.kv_bytes_per_token
    assert computed_together(engine, recorded, SchedulerSettings(kv_bytes=limit), long, *shorts).index(long) == 3


def test_a_cancelled_prefill_computes_no_further_part(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(engine, monkeypatch, rows=8)
    long = engine.prompt(QUESTION, PASSAGES)
    with Scheduler(engine) as scheduler:

        def cancel_in_the_middle(prompt: Prompt) -> None:
            if len(recorded.parts) == 3:
                answer.cancel()

        recorded.pause = cancel_in_the_middle
        with scheduler._changed:
            answer = scheduler.submit(long, LONG, method=make_method("full"))
        with pytest.raises(CancelledError):
            answer.result(60)
    assert len(recorded.parts) == 4
    assert recorded.closed == [long], "its memory is free"


def test_parts_take_the_time_that_is_set(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part at the end of a long prompt has fewer rows than one at its beginning, as attention takes longer."""
    seconds, clock, sizes = iter([0.0, *[1.0] * 50]), [0.0], list[int]()
    plain = engine.prefill_in_parts

    def slow(prompt: Prompt, **rest: Any) -> Any:
        rows = rest.pop("part_rows")
        parts, before = plain(prompt, part_rows=rows, **rest), 0
        while True:
            clock[0] += next(seconds)
            try:
                left = next(parts)
            except StopIteration as finished:
                return finished.value
            sizes.append(before - left)
            before = left
            yield left

    monkeypatch.setattr(engine, "prefill_in_parts", slow)
    monkeypatch.setattr(scheduler_module.time, "perf_counter", lambda: clock[0])
    with Scheduler(engine, SchedulerSettings(rows=200, part_s=0.8)) as scheduler:
        scheduler.submit(engine.prompt(QUESTION, PASSAGES * 2), LONG, method=make_method("full")).result(60)
    assert sizes[1] == 100, "as nothing is known of the time that rows take"
    assert sizes[2] == 80
    assert sizes[3] == scheduler_module.MIN_LONE_PART_ROWS


def test_answers_go_on_while_a_long_prompt_is_prefilled(engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    by_steps = replace(LONG, prompt_lookup_num_tokens=0)
    short, long, full = engine.prompt("Why?"), engine.prompt(QUESTION, PASSAGES), make_method("full")
    expected = [engine.generate(prompt, LONG, method=full).ids for prompt in (short, long)]

    def stepped(lm: Any, tokens: Any, positions: list[int], buffers: Any) -> Any:
        steps.append(recorded.parts.count(long))
        return forward_step(lm, tokens, positions, buffers)

    monkeypatch.setattr(step_graph, "forward_step", stepped)
    recorded = Recorded(engine, monkeypatch, rows=16)
    with Scheduler(engine, SchedulerSettings(steps=3)) as scheduler:
        answers = [scheduler.submit(prompt, by_steps, method=full) for prompt in (short, long)]
        assert [answer.result(timeout=60).ids for answer in answers] == expected
    parts = recorded.parts.count(long)
    assert [steps.count(part) for part in range(1, parts)] == [3] * (parts - 1), "steps between two parts"


@pytest.mark.slow
def test_active_requests_share_a_bound_of_bytes(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    request_bytes = (len(prompt) + LONG.max_new_tokens) * engine.lm.kv_bytes_per_token
    most = 0
    with Scheduler(engine, SchedulerSettings(kv_bytes=2 * request_bytes)) as scheduler:
        answers = [scheduler.submit(prompt, LONG) for _ in range(5)]
        while any(answer.generation is None for answer in answers):
            most = max(most, scheduler.active)
            time.sleep(0.001)  # a loop that holds Python's lock slows the scheduler's thread fifty times
        assert most == 2
    with Scheduler(engine, SchedulerSettings(kv_bytes=1)) as scheduler:
        assert scheduler.submit(prompt, LONG).result(20).ids, "alone it may be larger"


def test_closing_answers_what_was_submitted_or_cancels_it(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    scheduler = Scheduler(engine)
    answers = [scheduler.submit(prompt, LONG) for _ in range(3)]
    scheduler.close()
    assert all(answer.generation is not None for answer in answers)
    with pytest.raises(Closed, match="load another one"):
        scheduler.submit(prompt, LONG)


@pytest.mark.parametrize("reader_cancelled", [False, True])
def test_what_its_reader_has_cancelled_is_no_error_when_the_scheduler_closes(
    engine: FusionEngine, reader_cancelled: bool
) -> None:
    scheduler = Scheduler(engine)
    answer = scheduler.submit(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=200))
    next(answer)
    if reader_cancelled:
        answer.cancel()
    scheduler.close(drain=False)
    if reader_cancelled:
        assert answer.result().finish_reason == "cancelled"
        return
    for read in (answer.result, lambda: "".join(answer)):
        with pytest.raises(Closed, match="before the answer was whole"):
            read()


def test_methods_are_each_requests_own(engine: FusionEngine, scheduler: Scheduler) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    answers = [scheduler.submit(prompt, LONG, method=method) for method in (make_method("full"), None)]
    assert [answer.result(20).report.method for answer in answers] == ["full", "qcfuse"]


def test_what_cannot_be_is_refused_at_once(engine: FusionEngine, scheduler: Scheduler) -> None:
    with pytest.raises(ValueError, match="steps must be at least 1"):
        SchedulerSettings(steps=0)
    with pytest.raises(PromptTooLong):
        scheduler.submit(engine.prompt(QUESTION, PASSAGES * 40))


def test_a_long_answer_is_cut_to_what_fits(engine: FusionEngine, scheduler: Scheduler) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    room, params = engine.lm.context_window.tokens - len(prompt), SamplingParams(max_new_tokens=100_000)
    for done in (scheduler.submit(prompt, params).result(60), engine.generate(prompt, params)):
        assert len(done.ids) == room
        assert done.report.answer_limit == (
            f"the answer may have {room:,} tokens instead of 100,000: no more fit the context window"
        )
    assert engine.generate(prompt, SamplingParams(max_new_tokens=2)).report.answer_limit is None


def test_time_of_other_requests_is_told_apart(engine: FusionEngine) -> None:
    prompt, pauses = engine.prompt(QUESTION, PASSAGES), 0
    parts = engine.prefill_in_parts(prompt, method=make_method("full"), part_rows=lambda: 30)
    while True:
        try:
            next(parts)
        except StopIteration as finished:
            timings = finished.value.report.timings
            break
        pauses += 1
        time.sleep(0.05)
    assert pauses > 1
    assert timings.others_s >= 0.05 * pauses
    assert timings.recompute_s + timings.load_s < timings.ttft_s - timings.others_s + 1e-6
