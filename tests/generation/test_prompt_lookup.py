"""Prompt lookup decoding: the same tokens in fewer passes, and a bounded loss where candidates are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, SamplingParams
from qcfuse_rag.engine.scheduler import Scheduler
from qcfuse_rag.generation.decoding import CREDIT, SAVED, PromptLookup, prompt_lookup
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

BY_LOOKUP = SamplingParams(max_new_tokens=40)
BY_STEPS = replace(BY_LOOKUP, prompt_lookup_num_tokens=0)
COST = 0.1


@pytest.fixture
def engine(main_family: LanguageModel) -> FusionEngine:
    return make_warmed_engine(main_family, bases=(BLIND, FRAMED))


class TestCandidates:
    """Which tokens are guessed."""

    def test_the_longest_ngram_decides_and_then_the_last_place(self) -> None:
        lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5, 2, 3, 6], 2, COST)
        assert lookup.candidates([1, 2, 3], 9) == [4, 9]
        lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5, 2, 3, 6], 2, COST)
        assert lookup.candidates([8, 2, 3], 9) == [6, 8]

    def test_the_answer_is_looked_up_as_well(self) -> None:
        lookup = PromptLookup([1], 4, COST)
        assert lookup.candidates([5, 6], 9) == []
        assert lookup.candidates([5, 6, 7, 8, 5, 6], 9) == [7, 8, 5, 6]

    @pytest.mark.parametrize("limit", [-1, 0, 1, 3])
    def test_the_limit_holds(self, limit: int) -> None:
        assert len(PromptLookup([1, 2, 3, 4, 5, 6, 7], 5, COST).candidates([1, 2], limit)) == max(0, limit)

    @pytest.mark.parametrize("ids", [[], [1], [1, 2]])
    def test_nothing_is_guessed_behind_few_tokens(self, ids: list[int]) -> None:
        assert PromptLookup(ids, 5, COST).candidates([3], 9) == []

    def test_gpus_and_users_can_do_without(self, llama: LanguageModel) -> None:
        on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
        assert prompt_lookup(on_gpu, [1, 2], None) is None
        assert prompt_lookup(llama, [1, 2], 0) is None
        assert prompt_lookup(llama, [1, 2], None) is not None


def test_wrong_candidates_lose_two_steps_and_a_tenth_of_the_others() -> None:
    lookup, rows, steps = PromptLookup([1, 2, 3, 4, 5, 6], 5, COST), 0, 400
    for count in range(steps):
        rows += len(lookup.candidates([1, 2] * (count + 1), 9))
    assert 0 < rows * COST <= CREDIT + SAVED * steps


def test_chosen_candidates_pay_for_the_others() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6], 5, COST)
    for count in range(1, 400):
        assert lookup.candidates([1, 2] * count, 9), "one of at most five is right, and five cost half a step"
        lookup.accept()


class TestAnswers:
    """The answers of an engine."""

    @pytest.mark.parametrize(
        ("max_new_tokens", "settings"),
        [(1, {}), (2, {}), (40, {"temperature": 0.7, "seed": 3}), (40, {"frequency_penalty": 0.2, "logprobs": 2})],
    )
    def test_tokens_are_those_without_candidates(
        self, engine: FusionEngine, settings: dict[str, Any], max_new_tokens: int
    ) -> None:
        prompt = engine.prompt(QUESTION, PASSAGES)
        plain, looked_up = (
            engine.generate(prompt, replace(params, **settings, max_new_tokens=max_new_tokens))
            for params in (BY_STEPS, BY_LOOKUP)
        )
        assert (looked_up.ids, looked_up.text, looked_up.finish_reason) == (plain.ids, plain.text, plain.finish_reason)
        assert plain.passes == len(plain.ids) - 1
        assert looked_up.passes <= plain.passes
        for ours, theirs in zip(looked_up.logprobs or (), plain.logprobs or (), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)

    def test_right_candidates_need_one_pass(self, engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        prompt = engine.prompt(QUESTION, PASSAGES)
        plain = engine.generate(prompt, BY_STEPS)
        give_candidates(monkeypatch, lambda answer: plain.ids[len(answer) :][:7])
        looked_up = engine.generate(prompt, BY_LOOKUP)
        assert looked_up.ids == plain.ids
        assert looked_up.passes == -(-(len(plain.ids) - 1) // 8)

    def test_rows_of_wrong_candidates_are_not_read(self, engine: FusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        prompt = engine.prompt(QUESTION, PASSAGES)
        plain = engine.stream(prompt, BY_STEPS)
        ids = plain.result().ids
        give_candidates(monkeypatch, lambda answer: [*ids[len(answer) :][:1], 7, 7, 7])
        looked_up = engine.stream(prompt, BY_LOOKUP)
        assert looked_up.result().ids == ids
        known = len(prompt) + len(ids) - 1
        for ours, theirs in zip(looked_up.prefilled.buffer.keys, plain.prefilled.buffer.keys, strict=True):
            assert torch.allclose(ours[:, :, :known], theirs[:, :, :known], atol=1e-4)

    @pytest.mark.parametrize("others", [0, 3])
    def test_served_answers_are_the_same_alone_and_among_others(self, engine: FusionEngine, others: int) -> None:
        prompts = [engine.prompt(question, PASSAGES) for question in (QUESTION, "Why?", "Who?", "When?")[: others + 1]]
        expected = [engine.generate(prompt, BY_STEPS).ids for prompt in prompts]
        with Scheduler(engine) as scheduler:
            answers = [scheduler.submit(prompt, BY_LOOKUP) for prompt in prompts]
            assert [answer.result(60).ids for answer in answers] == expected


def give_candidates(monkeypatch: pytest.MonkeyPatch, guess: Callable[[Sequence[int]], Sequence[int]]) -> None:
    monkeypatch.setattr(PromptLookup, "candidates", lambda self, answer, limit: list(guess(answer))[: max(0, limit)])
