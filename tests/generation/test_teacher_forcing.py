"""Teacher-forced logits are those of decode steps, and answers are compared along all their tokens."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Prompt, SamplingParams, make_method
from qcfuse_rag.generation.stop_criteria import end_tokens
from qcfuse_rag.generation.teacher_forcing import answer_logits, greedy_answer
from qcfuse_rag.verification.divergence import AnswerDivergence, compare_answers, divergence
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

FULL, REUSE = make_method("full"), make_method("reuse")
LENGTH = 24


@pytest.fixture
def served(family: LanguageModel) -> FusionEngine:
    engine = make_engine(family, MemoryStore())
    engine.warm(PASSAGES)
    return engine


@pytest.fixture
def prompt(served: FusionEngine) -> Prompt:
    return served.prompt(QUESTION, PASSAGES)


def test_the_greedy_answer_is_that_of_plain_decoding(served: FusionEngine, prompt: Prompt) -> None:
    for method in (FULL, REUSE):
        prefilled = served.prefill(prompt, method=method, answer_tokens=LENGTH)
        ids, logits = greedy_answer(served.runner, prefilled, LENGTH)
        assert ids == served.generate(prompt, SamplingParams(max_new_tokens=LENGTH), method=method).ids
        assert (logits.dtype, logits.shape[0]) == (torch.float32, len(ids))
        assert tuple(logits.argmax(-1).tolist()) == ids


def test_logits_along_an_answer_are_those_of_decode_steps(served: FusionEngine, prompt: Prompt) -> None:
    for method in (FULL, REUSE):
        prefilled = served.prefill(prompt, method=method, answer_tokens=LENGTH)
        ids, stepwise = greedy_answer(served.runner, prefilled, LENGTH)
        torch.testing.assert_close(answer_logits(served.runner, prefilled, ids), stepwise, rtol=1e-4, atol=1e-4)


def test_logits_along_a_foreign_answer_are_the_models_own(served: FusionEngine, prompt: Prompt) -> None:
    prefilled = served.prefill(prompt, method=FULL, answer_tokens=LENGTH)
    greedy_answer(served.runner, prefilled, LENGTH)  # leaves rows behind the prompt, which nothing may read
    foreign = list(range(30, 30 + LENGTH))
    with torch.inference_mode():
        expected = served.lm.model(torch.tensor([[*prompt.ids, *foreign]])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(answer_logits(served.runner, prefilled, foreign), expected.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_caches_are_identical_exactly_if_their_greedy_answers_are(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_engine(LanguageModel.wrap(build_model("llama"), tokenizer, name="llama"), MemoryStore())
    engine.warm(PASSAGES)
    outcomes = set()
    for question, ratio in ((f"Who keeps {thing}?", ratio) for thing in "abcdefgh" for ratio in (0.0, 0.5, 0.97)):
        prompt = engine.prompt(question, PASSAGES)
        full = engine.prefill(prompt, method=FULL, answer_tokens=6)
        ids, logits = greedy_answer(engine.runner, full, 6)
        method = make_method("random", ratio=ratio) if ratio else REUSE
        fused = engine.prefill(prompt, method=method, answer_tokens=6)
        compared = compare_answers(logits, answer_logits(engine.runner, fused, ids))
        assert compared.identical == (greedy_answer(engine.runner, fused, 6)[0] == ids)
        assert compared.first_kl == pytest.approx(divergence(full.logits, fused.logits))
        outcomes.add(compared.identical)
    assert outcomes == {True, False}, "one outcome alone would prove nothing"


def test_an_end_token_ends_an_answer(engine: FusionEngine) -> None:
    prefilled = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=FULL, answer_tokens=8)
    end = min(end_tokens(engine.lm))
    with torch.inference_mode():
        prefilled.logits[end] = prefilled.logits.max() + 1
    ids, logits = greedy_answer(engine.runner, prefilled, 8)
    assert (ids, len(logits)) == ((end,), 1)
    assert answer_logits(engine.runner, prefilled, ids).equal(logits)
    assert answer_logits(engine.runner, prefilled, ()).shape == (0, len(prefilled.logits))


def test_an_answer_that_does_not_fit_the_buffer_is_refused(engine: FusionEngine) -> None:
    prefilled = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=FULL, answer_tokens=3)
    greedy_answer(engine.runner, prefilled, 4)  # the last token is not fed
    answer_logits(engine.runner, prefilled, [5] * 4)
    with pytest.raises(ValueError, match="reserve more"):
        greedy_answer(engine.runner, prefilled, 5)
    with pytest.raises(ValueError, match="reserve more"):
        answer_logits(engine.runner, prefilled, [5] * 5)
    with pytest.raises(ValueError, match="at least 1 token"):
        greedy_answer(engine.runner, prefilled, 0)


def test_figures_along_an_answer() -> None:
    full = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]]).log_softmax(-1)
    other = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0]]).log_softmax(-1)
    compared = compare_answers(full, other)
    expected = float((full[1].exp() * (full[1] - other[1])).sum())
    assert compared.kl == (0.0, pytest.approx(expected))
    assert (compared.agrees, compared.top1, compared.identical) == ((True, False), 0.5, False)
    assert compared.mean_kl == pytest.approx(expected / 2)
    assert AnswerDivergence((0.5, math.log(2)), (True, True)).identical
    with pytest.raises(ValueError, match="the same answer"):
        compare_answers(full, other[:1])
