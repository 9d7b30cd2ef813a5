"""Speculative answers are full prefill's, for any draft method and draft length."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from itertools import product, takewhile

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, Generation, LanguageModel, MemoryStore, Prompt, SamplingParams, make_method
from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.generation.speculative import generate_speculative
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.prefill_base import BLIND, FRAMED
from tests.support import references
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

FAMILIES = ["llama", "mistral-sliding", "gemma2-softcap"]
METHODS = [make_method("reuse"), make_method("qcfuse", ratio=0.3), make_method("qcfuse", ratio=0.3, base=FRAMED)]
LENGTH = 24
FULL = make_method("full")


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> FusionEngine:
    lm = LanguageModel.wrap(build_model(request.param), tokenizer, name=request.param)
    engine = make_engine(lm, MemoryStore())
    engine.warm(PASSAGES, bases=(BLIND, FRAMED))
    return engine


@pytest.fixture
def prompt(engine: FusionEngine) -> Prompt:
    return engine.prompt(QUESTION, PASSAGES)


def up_to_the_end(engine: FusionEngine, ids: list[int]) -> tuple[int, ...]:
    end = engine.lm.tokenizer.eos_token_id
    return tuple(ids[: ids.index(end) + 1] if end in ids else ids)


def same(verified: Generation, plain: Generation) -> bool:
    return (verified.ids, verified.text, verified.finish_reason) == (plain.ids, plain.text, plain.finish_reason)


def test_the_answer_is_the_models_own_greedy_continuation(engine: FusionEngine, prompt: Prompt) -> None:
    expected = up_to_the_end(engine, references.greedy_continuation(engine.lm, prompt.ids, LENGTH))
    plain = engine.generate(prompt, SamplingParams(max_new_tokens=LENGTH), method=FULL)
    for method, draft in product(METHODS, [1, 3, 25]):
        generation = generate_speculative(
            engine.runner, prompt, SamplingParams(max_new_tokens=LENGTH), method=method, draft=draft
        )
        assert generation.ids == expected, (method.name, draft)
        assert same(generation, plain)


def test_the_counts_are_those_of_drafts_that_start_afresh(engine: FusionEngine, prompt: Prompt) -> None:
    """A slow reference without roll-back: every drafted token comes from a new fused prefill."""
    method, size = make_method("reuse"), 4
    exact = engine.generate(prompt, SamplingParams(max_new_tokens=LENGTH), method=FULL).ids
    end = engine.lm.tokenizer.eos_token_id

    def draft_behind(answer: tuple[int, ...], count: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < count and end not in drafted:
            tail = prompt.segments[-1]
            longer = replace(tail, ids=(*tail.ids, *answer, *drafted))
            done = engine.prefill(replace(prompt, segments=(*prompt.segments[:-1], longer)), method=method)
            drafted.append(int(done.logits.argmax()))
        return drafted

    drafted = draft_behind((), 1)
    total, compared, accepted, passes = 1, 1, int(drafted[0] == exact[0]), 0
    done = 1
    while done < len(exact):
        drafted = draft_behind(exact[:done], min(size, LENGTH - done - 1))
        passes += 1
        total += len(drafted)
        right = list(takewhile(lambda pair: pair[0] == pair[1], zip(drafted, exact[done:], strict=False)))
        accepted += len(right)
        compared += min(len(right) + 1, len(drafted), len(exact) - done)
        done += len(right) + 1

    generation = generate_speculative(
        engine.runner, prompt, SamplingParams(max_new_tokens=LENGTH), method=method, draft=size
    )
    assert (generation.drafted, generation.compared, generation.accepted, generation.passes) == (
        total,
        compared,
        accepted,
        passes,
    )


def test_an_exact_draft_is_accepted_whole(engine: FusionEngine, prompt: Prompt) -> None:
    generation = generate_speculative(
        engine.runner, prompt, SamplingParams(max_new_tokens=LENGTH), method=FULL, draft=9
    )
    assert generation.compared == generation.accepted
    assert generation.agreement == 1.0
    assert generation.passes == -(-(len(generation.ids) - 1) // 10), "nine drafted tokens and one exact one a pass"


def test_drafts_take_fewer_passes_than_decoding(engine: FusionEngine, prompt: Prompt) -> None:
    method = make_method("random", ratio=0.9)
    generation = generate_speculative(engine.runner, prompt, SamplingParams(max_new_tokens=LENGTH), method=method)
    assert 0 < generation.passes <= len(generation.ids) - 1
    assert 0.0 <= generation.agreement <= 1.0
    assert generation.accepted <= generation.compared <= generation.drafted


@pytest.mark.parametrize("length", [1, 2, 3, 25, 26, 27])
def test_the_length_limit_is_respected(engine: FusionEngine, prompt: Prompt, length: int) -> None:
    params = SamplingParams(max_new_tokens=length)
    assert same(
        generate_speculative(engine.runner, prompt, params, method=engine.method),
        engine.generate(prompt, params, method=FULL),
    )


@pytest.mark.parametrize("at", [0, 1, 3, 7])
def test_an_end_token_ends_it_wherever_in_a_draft(
    engine: FusionEngine, prompt: Prompt, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = engine.generate(prompt, SamplingParams(max_new_tokens=12), method=FULL)
    assert engine.lm.model.generation_config is not None
    monkeypatch.setattr(engine.lm.model.generation_config, "eos_token_id", [free.ids[at], 2])
    for method in (*METHODS, FULL):
        generation = generate_speculative(
            engine.runner, prompt, SamplingParams(max_new_tokens=12), method=method, draft=5
        )
        assert same(generation, engine.generate(prompt, SamplingParams(max_new_tokens=12), method=FULL))
        assert generation.finish_reason == "end"


def test_a_stop_string_ends_it_and_is_cut_off(engine: FusionEngine) -> None:
    prompts = (engine.prompt(question, PASSAGES) for question in ("Who?", "Where?", "When?", "Why?"))
    prompt, free = next(
        (prompt, text)
        for prompt in prompts
        if len(text := engine.generate(prompt, SamplingParams(max_new_tokens=24), method=FULL).text) > 3
    )
    params = SamplingParams(max_new_tokens=24, stop=(free[len(free) // 2 :][:3],))
    generation = generate_speculative(engine.runner, prompt, params, method=engine.method, draft=6)
    assert same(generation, engine.generate(prompt, params, method=FULL))
    assert generation.finish_reason == "stop"


def test_both_prefills_are_reported_and_it_is_plain_data(engine: FusionEngine, prompt: Prompt) -> None:
    generation = generate_speculative(engine.runner, prompt, SamplingParams(max_new_tokens=6), method=METHODS[1])
    assert (generation.report.method, generation.exact.method) == ("qcfuse", "full")
    assert generation.report.reused_tokens > 0 == generation.exact.reused_tokens
    data = json.loads(json.dumps(generation.to_dict()))
    assert data["verified"]["accepted"] == generation.accepted
    assert data["exact"]["rows"] == len(prompt)


def test_what_cannot_be_verified_is_refused_before_any_work(engine: FusionEngine, prompt: Prompt) -> None:
    with pytest.raises(ValueError, match=r"only greedy answers can be verified, not temperature 0\.7; set it to 0"):
        generate_speculative(engine.runner, prompt, SamplingParams(temperature=0.7), method=engine.method)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        generate_speculative(engine.runner, prompt, method=engine.method, draft=0)
    with pytest.raises(PromptTooLong, match="context window"):
        generate_speculative(engine.runner, prompt, SamplingParams(max_new_tokens=5000), method=engine.method)


def test_a_store_that_hangs_costs_its_limit_and_the_answer_is_the_same(
    engine: FusionEngine, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, released = SamplingParams(max_new_tokens=6), threading.Event()
    expected = engine.generate(prompt, params, method=FULL)
    impatient = make_engine(engine.lm, engine.store, load_limit_s=0.3)
    monkeypatch.setattr(engine.store, "get", lambda key: Miss("late" if released.wait(60) else "never"))
    generation = generate_speculative(impatient.runner, prompt, params, method=METHODS[0])
    released.set()
    assert same(generation, expected)
    assert "0.3 s" in str(generation.report.fallback)
    assert generation.exact.fallback is None  # full prefill asks the store for nothing
