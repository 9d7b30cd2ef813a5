"""Penalties and biases: as transformers and OpenAI define them, and what they mean for exact answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from qcfuse_rag import FusionEngine, LanguageModel, QCFuseError, SamplingParams, make_method
from qcfuse_rag.generation.sampling import MIN_TEMPERATURE, Sampler
from tests.support.passages import PASSAGES, QUESTION


@pytest.fixture
def logits(llama: LanguageModel) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(llama.model.get_input_embeddings().num_embeddings)


def test_a_token_becomes_less_likely_the_more_often_the_answer_has_it(
    llama: LanguageModel, logits: torch.Tensor
) -> None:
    first, second, third = (int(token) for token in logits.topk(3).indices)
    gap = float(logits[first] - logits[second])
    frequency = Sampler(SamplingParams(frequency_penalty=gap * 0.6), llama)
    assert [frequency(logits, [first] * 9, [first] * count) for count in (0, 1, 2)] == [first, first, second]
    presence = Sampler(SamplingParams(presence_penalty=gap * 0.6), llama)
    assert [presence(logits, [], [first] * count) for count in (1, 9)] == [first, first]
    both = Sampler(SamplingParams(presence_penalty=100.0), llama)
    assert both(logits, [first], [first, second]) == third, "the prompt does not count"


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_answer(
    llama: LanguageModel, logits: torch.Tensor, penalty: float
) -> None:
    prompt, answer = logits.topk(5).indices.tolist(), logits.topk(5, largest=False).indices.tolist()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits[None].clone())[0]
    sampler = Sampler(SamplingParams(repetition_penalty=penalty), llama)
    assert sampler(logits.clone(), prompt, answer) == int(expected.argmax())


def test_biases_are_added(llama: LanguageModel, logits: torch.Tensor) -> None:
    chosen, best = int(logits.argmin()), int(logits.argmax())
    assert Sampler(SamplingParams(logit_bias=((chosen, 100.0),)), llama)(logits) == chosen
    assert Sampler(SamplingParams(logit_bias=((best, -100.0),)), llama)(logits) != best
    with pytest.raises(QCFuseError, match="logit_bias names token"):
        Sampler(SamplingParams(logit_bias=((len(logits), 1.0),)), llama)


def test_min_p_keeps_tokens_near_the_likeliest(llama: LanguageModel, logits: torch.Tensor) -> None:
    logits[:] = -10.0
    logits[3], logits[4], logits[5] = 5.0, 4.9, 2.0
    sampler = Sampler(SamplingParams(temperature=1.0, min_p=0.5, seed=1), llama)
    assert {sampler(logits) for _ in range(60)} == {3, 4}


def test_logits_are_not_changed(llama: LanguageModel, logits: torch.Tensor) -> None:
    before = logits.clone()
    settings: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": ((1, 3.0),)}
    Sampler(SamplingParams(**settings), llama)(logits, [1, 2], [3])
    assert torch.equal(logits, before)


def test_an_answer_with_penalties_is_exact_and_says_that_it_is_not_verified(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    prompt = engine.prompt(QUESTION, PASSAGES)
    settings: dict[str, Any] = {"max_new_tokens": 12, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    exact = engine.generate(prompt, SamplingParams(fidelity="exact", **settings))
    full = engine.generate(prompt, SamplingParams(**settings), method=make_method("full"))
    assert exact.ids == full.ids
    assert exact.verified_upto is None


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"top_p": -0.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"logit_bias": ((1, float("nan")),)},
        {"stop": "abc"},
        {"stop": ("",)},
        {"logprobs": -1},
        {"prompt_lookup_num_tokens": -1},
        {"fidelity": "slow"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}.* must be "):
        SamplingParams(**settings)


@pytest.mark.parametrize("temperature", [1, 1e-40])
def test_whole_and_tiny_temperatures_are_temperatures(
    llama: LanguageModel, logits: torch.Tensor, temperature: float
) -> None:
    token = Sampler(SamplingParams(temperature=temperature, seed=1), llama)(logits)
    assert token == int(logits.argmax()) or temperature == 1
    usual = Sampler(SamplingParams(temperature=max(float(temperature), MIN_TEMPERATURE), seed=1), llama)
    assert token == usual(logits)
