"""Answers that are full prefill's, token for token."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from qcfuse_rag import FusionEngine, Generation, LanguageModel, Prompt, SamplingParams, make_method
from qcfuse_rag.fusion.healing import Healing
from qcfuse_rag.generation import decoding
from qcfuse_rag.generation.decoding import DRAFT_TOKENS, HealingReport
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support import references
from tests.support.cases import cases
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

FULL = make_method("full")
METHODS = [make_method("reuse"), make_method("qcfuse", ratio=0.3), make_method("qcfuse", ratio=0.3, base=FRAMED)]
LENGTH = 40
EXACT = SamplingParams(max_new_tokens=LENGTH, fidelity="exact")
GREEDY = SamplingParams(max_new_tokens=LENGTH)
GRAMMAR = SamplingParams(max_new_tokens=12, grammar='start: /[a-m ]{4,9}/ "."')


@pytest.fixture
def engine(main_family: LanguageModel) -> FusionEngine:
    return make_warmed_engine(main_family, bases=(BLIND, FRAMED))


@pytest.fixture
def prompt(engine: FusionEngine) -> Prompt:
    return engine.prompt(QUESTION, PASSAGES)


def healed(answer: Generation) -> HealingReport:
    assert answer.healing is not None
    return answer.healing


def same(answer: Generation, plain: Generation) -> bool:
    return (answer.ids, answer.text, answer.finish_reason) == (plain.ids, plain.text, plain.finish_reason)


class TestEveryFamily:
    @pytest.fixture
    def engine(self, family: LanguageModel) -> FusionEngine:
        return make_warmed_engine(family, bases=(BLIND, FRAMED))

    def test_the_answer_is_the_models_own_greedy_continuation(self, engine: FusionEngine, prompt: Prompt) -> None:
        ids = references.greedy_continuation(engine.lm, prompt.ids, LENGTH)
        end = engine.lm.tokenizer.eos_token_id
        expected = tuple(ids[: ids.index(end) + 1] if end in ids else ids)
        for method in METHODS:
            stream = engine.stream(prompt, EXACT, method=method)
            answer, buffer = stream.result(), stream.prefilled.buffer
            assert answer.ids == expected, method.name
            assert answer.verified_upto == len(expected)
            assert same(answer, engine.generate(prompt, GREEDY, method=FULL))
            assert (healed(answer).exact_tokens, healed(answer).reason) == (len(prompt), None)
            assert 0 < healed(answer).drafted <= DRAFT_TOKENS
            _, table = references.plain_forward(engine.lm, prompt.ids + expected[:-1])
            for layer, (keys, values) in enumerate(table):
                for ours, theirs in ((buffer.keys[layer], keys), (buffer.values[layer], values)):
                    assert float((ours[:, :, : theirs.shape[2]] - theirs).abs().max()) < 1e-4


class TestExact:
    @pytest.mark.slow
    def test_the_draft_is_accepted_as_far_as_the_fused_answer_agrees(
        self, engine: FusionEngine, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Healing is held back until the draft is there, so the draft is the fused cache's own answer."""
        monkeypatch.setattr(Healing, "step", lambda healing, ids, rows, step=Healing.step: step(healing, ids, 0))
        fused = engine.generate(prompt, GREEDY, method=METHODS[0]).ids[:DRAFT_TOKENS]
        answer = engine.generate(prompt, EXACT, method=METHODS[0])
        full = engine.generate(prompt, GREEDY, method=FULL)
        assert same(answer, full)
        agreeing = [pair[0] == pair[1] for pair in zip(fused, full.ids, strict=False)]
        agreed = agreeing.index(False) if False in agreeing else len(agreeing)
        assert (healed(answer).drafted, healed(answer).accepted) == (len(fused), agreed)

    @pytest.mark.parametrize("length", cases([1, 2, DRAFT_TOKENS, DRAFT_TOKENS + 1], 1, DRAFT_TOKENS))
    def test_the_length_limit_is_respected(self, engine: FusionEngine, prompt: Prompt, length: int) -> None:
        params = replace(EXACT, max_new_tokens=length)
        full = engine.generate(prompt, replace(params, fidelity="fast"), method=FULL)
        assert same(engine.generate(prompt, params), full)

    @pytest.mark.parametrize("at", cases([0, 1, 3, 7], 0, 7))
    def test_an_end_token_ends_it_wherever_in_a_draft(
        self, engine: FusionEngine, prompt: Prompt, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The answer ends before healing is through."""
        free = engine.generate(prompt, GREEDY, method=FULL)
        assert engine.lm.model.generation_config is not None
        monkeypatch.setattr(engine.lm.model.generation_config, "eos_token_id", [free.ids[min(at, len(free.ids) - 1)]])
        for method in (*METHODS, FULL):
            answer = engine.generate(prompt, EXACT, method=method)
            assert same(answer, engine.generate(prompt, GREEDY, method=FULL))
            assert answer.finish_reason == "end"
            assert answer.verified_upto == len(answer.ids)

    def test_a_stop_string_ends_it_and_is_cut_off(self, engine: FusionEngine) -> None:
        prompts = (engine.prompt(question, PASSAGES) for question in ("Who?", "Where?", "When?", "Why?"))
        prompt, free = next(
            (prompt, text) for prompt in prompts if len(text := engine.generate(prompt, GREEDY, method=FULL).text) > 3
        )
        stop = (free[len(free) // 2 :][:3],)
        answer = engine.generate(prompt, replace(EXACT, stop=stop))
        assert same(answer, engine.generate(prompt, replace(GREEDY, stop=stop), method=FULL))
        assert answer.finish_reason == "stop"

    def test_text_streams_once_it_is_verified_and_not_before(self, engine: FusionEngine, prompt: Prompt) -> None:
        stream = engine.stream(prompt, EXACT, method=METHODS[0])
        assert stream.verified_upto is None
        pieces = [(piece, stream.verified_upto) for piece in stream]
        assert None not in [verified for _, verified in pieces]
        assert "".join(piece for piece, _ in pieces) == stream.result().text
        assert same(stream.result(), engine.generate(prompt, GREEDY, method=FULL))

    def test_a_sampled_answer_is_sampled_over_the_exact_cache(self, engine: FusionEngine, prompt: Prompt) -> None:
        sampled = SamplingParams(max_new_tokens=12, temperature=0.9, seed=7)
        answer = engine.generate(prompt, replace(sampled, fidelity="exact"))
        assert same(answer, engine.generate(prompt, sampled, method=FULL))
        assert answer.verified_upto is None
        assert healed(answer).drafted == 0
        assert healed(answer).exact_tokens == len(prompt)

    def test_an_answer_of_a_grammar_is_full_prefills(self, engine: FusionEngine, prompt: Prompt) -> None:
        pytest.importorskip("llguidance")
        answer = engine.generate(prompt, replace(GRAMMAR, fidelity="exact"))
        assert same(answer, engine.generate(prompt, GRAMMAR, method=FULL))
        assert healed(answer).exact_tokens == len(prompt)
        assert answer.verified_upto == len(answer.ids)

    def test_a_prompt_that_was_computed_in_full_is_decoded_at_once(self, engine: FusionEngine, prompt: Prompt) -> None:
        answer = engine.generate(prompt, EXACT, method=FULL)
        assert (healed(answer).drafted, answer.verified_upto) == (0, len(answer.ids))

    def test_a_cancelled_draft_leaves_no_text(self, engine: FusionEngine, prompt: Prompt) -> None:
        cancel = threading.Event()
        stream = engine.stream(prompt, EXACT, cancel=cancel)
        cancel.set()
        assert list(stream) == []
        assert stream.generation is not None
        assert (stream.generation.text, stream.generation.finish_reason) == ("", "cancelled")
        assert "prompt tokens were exact" in str(healed(stream.generation).reason)

    @pytest.mark.parametrize("failing", cases(["step", "advance", "finish"], "step"))
    def test_if_healing_fails_the_prompt_is_computed_in_full(
        self, engine: FusionEngine, prompt: Prompt, failing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decoding, "ROWS_PER_PASS", 8)
        monkeypatch.setattr(decoding, "DRAFT_TOKENS", 3)
        monkeypatch.setattr(Healing, "step", lambda healing, ids, rows, step=Healing.step: step(healing, ids, 0))
        monkeypatch.setattr(Healing, failing, broken)
        answer = engine.generate(prompt, EXACT, method=METHODS[0])
        assert same(answer, engine.generate(prompt, GREEDY, method=FULL))
        assert healed(answer).reason == "healing failed: the device is out of memory"
        assert answer.verified_upto == len(answer.ids)


def broken(*arguments: Any, **settings: Any) -> Any:
    raise RuntimeError("the device is out of memory")


def test_fast_reports_no_healing_and_all_reports_are_plain_data(engine: FusionEngine, prompt: Prompt) -> None:
    fast, exact = engine.generate(prompt, GREEDY), engine.generate(prompt, EXACT)
    assert (fast.healing, fast.verified_upto, fast.to_dict()["verified_upto"]) == (None, None, None)
    data = json.loads(json.dumps(exact.to_dict()))
    assert data["verified_upto"] == data["healing"]["verified_upto"] == len(exact.ids)
    assert data["healing"]["fidelity"] == "exact"
