"""A conversation computes what is new in each turn, and every answer is the one without that, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcfuse_rag import (
    FusionEngine,
    LanguageModel,
    MemoryStore,
    Method,
    SamplingParams,
    Scheduler,
    SchedulerSettings,
    make_method,
)
from qcfuse_rag.prompts.template import Turn
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.engines import METHOD, make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

FULL_PREFILL = make_method("full")
PARAMS = SamplingParams(max_new_tokens=5)
TURNS = 10


def make_pair(lm: LanguageModel, method: Method, prefix_bytes: int = 1 << 30) -> tuple[FusionEngine, FusionEngine]:
    """Return an engine that keeps finished requests, and one that does not, over the same passages."""
    store = MemoryStore()
    keeping = make_warmed_engine(lm, store, method=method, prefix_bytes=prefix_bytes, bases=(BLIND, FRAMED))
    return keeping, make_engine(lm, store, method=method)


def first_message(engine: FusionEngine, topic: int = 0) -> Turn:
    """Return a user's message with passages in front of the question, as frameworks put it together."""
    chosen = PASSAGES[topic % 3 :] + PASSAGES[: topic % 3]
    return "user", "".join(engine.prompts.template.format_chunk(text) for text in chosen[:2]) + f"{QUESTION} {topic}"


def test_ten_turns_are_answered_as_without_reuse(family: LanguageModel) -> None:
    keeping, plain = make_pair(family, FULL_PREFILL)
    messages: list[Turn] = [first_message(plain)]
    for turn in range(TURNS):
        prompt = plain.prompt_from_text(messages)
        found, expected = keeping.generate(prompt, PARAMS), plain.generate(prompt, PARAMS)
        assert found.ids == expected.ids
        assert bool(found.report.prefix_tokens) == bool(turn)
        assert found.report.rows == len(prompt) - found.report.prefix_tokens
        messages += [("assistant", expected.text), ("user", f"And {turn}?")]
    assert len(keeping.prefixes) == 1, "a turn takes the place of the one before"


def test_reused_rows_over_fused_caches_are_the_rows_that_were_computed(family: LanguageModel) -> None:
    keeping, _ = make_pair(family, METHOD)
    messages: list[Turn] = [first_message(keeping)]
    stream = keeping.stream(keeping.prompt_from_text(messages), PARAMS)
    answer = stream.result()
    prompt = keeping.prompt_from_text([*messages, ("assistant", answer.text), ("user", "Why?")])
    report = keeping.generate(prompt, PARAMS).report
    assert report.prefix_tokens > answer.report.prompt_tokens - 8
    assert not report.selected
    kept = stream.prefilled.buffer
    continued, held = keeping.runner.allocate(len(prompt)), report.prefix_tokens
    for ours, theirs in zip((*continued.keys, *continued.values), (*kept.keys, *kept.values), strict=True):
        ours[:, :, :held] = theirs[:, :, :held]
    plan = RowsPlan.between(held, len(prompt), family.device, family.sliding)
    expected = forward_rows(family, torch.tensor(prompt.ids[held:]), plan, continued)
    parts: Any = keeping.prefill_in_parts(prompt, prefixes=keeping.prefixes)
    with pytest.raises(StopIteration) as finished:
        next(parts)
    assert torch.allclose(finished.value.value.logits, expected, atol=1e-4)


@pytest.mark.slow
def test_eight_conversations_at_once_with_evictions(family: LanguageModel) -> None:
    bytes_of_two = 2 * 400 * family.kv_bytes_per_token
    keeping, plain = make_pair(family, FULL_PREFILL, prefix_bytes=bytes_of_two)
    conversations: list[list[Turn]] = [[first_message(plain, topic)] for topic in range(8)]
    reused = 0
    with Scheduler(keeping, SchedulerSettings(active=4, rows=64)) as scheduler:
        for turn in range(3):
            prompts = [plain.prompt_from_text(messages) for messages in conversations]
            for messages, prompt, request in zip(
                conversations, prompts, [scheduler.submit(prompt, PARAMS) for prompt in prompts], strict=True
            ):
                found = request.result(60)
                assert found.ids == plain.generate(prompt, PARAMS).ids
                assert keeping.prefixes.nbytes <= bytes_of_two
                reused += found.report.prefix_tokens
                messages += [("assistant", found.text), ("user", f"And {turn}?")]
    assert reused
