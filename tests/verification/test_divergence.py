"""Two caches are compared along full prefill's greedy answer: its tokens, its logits, and where they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, Prompt, SamplingParams, make_method
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.completion import end_tokens
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.key import BLIND, FRAMED
from qcfuse_rag.verification.divergence import (
    Divergence,
    answer_logits,
    compare_answers,
    compare_greedy_answers,
    divergence,
    greedy_answers,
)
from tests.support import seams
from tests.support.engines import make_warmed_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

NAN, INF = float("nan"), float("inf")
FULL, REUSE = make_method("full"), make_method("reuse")
LENGTH = 24


@pytest.fixture
def served(family: LanguageModel) -> FusionEngine:
    return make_warmed_engine(family)


@pytest.fixture
def prompt(served: FusionEngine) -> Prompt:
    return served.prompt(QUESTION, PASSAGES)


def test_the_greedy_answer_is_that_of_plain_decoding(served: FusionEngine, prompt: Prompt) -> None:
    for method in (FULL, REUSE):
        prefilled = served.prefill(prompt, method=method, answer_tokens=LENGTH)
        [(ids, logits)] = greedy_answers(served.runner, [prefilled], LENGTH)
        assert ids == served.generate(prompt, SamplingParams(max_new_tokens=LENGTH), method=method).ids
        assert (logits.dtype, tuple(logits.argmax(-1).tolist())) == (torch.float32, ids)
        torch.testing.assert_close(answer_logits(served.runner, prefilled, ids), logits, rtol=1e-4, atol=1e-4)


def test_logits_along_a_foreign_answer_are_the_models_own(served: FusionEngine, prompt: Prompt) -> None:
    prefilled = served.prefill(prompt, method=FULL, answer_tokens=LENGTH)
    greedy_answers(served.runner, [prefilled], LENGTH)  # leaves rows behind the prompt, which nothing may read
    foreign = list(range(30, 30 + LENGTH))
    with torch.inference_mode():
        expected = served.lm.model(torch.tensor([[*prompt.ids, *foreign]])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(answer_logits(served.runner, prefilled, foreign), expected.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_caches_are_identical_exactly_if_their_greedy_answers_are(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_warmed_engine(LanguageModel.wrap(build_model("llama"), tokenizer, name="llama"))
    outcomes = set()
    for question, ratio in ((f"Who keeps {thing}?", ratio) for thing in "abcdefgh" for ratio in (0.0, 0.5, 0.97)):
        prompt = engine.prompt(question, PASSAGES)
        full = engine.prefill(prompt, method=FULL, answer_tokens=6)
        [(ids, logits)] = greedy_answers(engine.runner, [full], 6)
        method = make_method("random", ratio=ratio) if ratio else REUSE
        fused = engine.prefill(prompt, method=method, answer_tokens=6)
        compared = compare_answers(logits, answer_logits(engine.runner, fused, ids))
        assert compared.identical == (greedy_answers(engine.runner, [fused], 6)[0][0] == ids)
        assert compared.first_kl == pytest.approx(divergence(full.logits, fused.logits))
        outcomes.add(compared.identical)
    assert outcomes == {True, False}, "one outcome alone would prove nothing"


def test_an_end_token_ends_an_answer(engine: FusionEngine) -> None:
    prefilled = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=FULL, answer_tokens=8)
    end = min(end_tokens(engine.lm))
    with torch.inference_mode():
        prefilled.logits[end] = prefilled.logits.max() + 1
    [(ids, logits)] = greedy_answers(engine.runner, [prefilled], 8)
    assert (ids, len(logits)) == ((end,), 1)
    assert answer_logits(engine.runner, prefilled, ids).equal(logits)
    assert answer_logits(engine.runner, prefilled, ()).shape == (0, len(prefilled.logits))


def test_figures_along_an_answer() -> None:
    full = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]]).log_softmax(-1)
    other = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0]]).log_softmax(-1)
    compared = compare_answers(full, other)
    expected = float((full[1].exp() * (full[1] - other[1])).sum())
    assert compared.kl == (0.0, pytest.approx(expected))
    assert (compared.agrees, compared.top1, compared.identical) == ((True, False), 0.5, False)
    assert compared.mean_kl == pytest.approx(expected / 2)
    assert Divergence((0.5, math.log(2)), (True, True)).identical


def test_answers_that_differ_are_decoded_and_no_others(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, decoded = make_warmed_engine(llama, bases=(BLIND, FRAMED)), []
    prompt = engine.prompt(QUESTION, PASSAGES)
    full, reuse = (
        engine.prefill(prompt, method=method, answer_tokens=8) for method in (FULL, make_method("reuse", base=FRAMED))
    )
    answer, other = greedy_answers(engine.runner, [full, reuse], 8)
    assert answer[0] != other[0], "or there is nothing to decode"

    def counted(runner: ModelRunner, prompts: Sequence[Prefilled], limit: int) -> object:
        decoded.extend(prompts)
        return greedy_answers(runner, prompts, limit)

    seams.verified_answers(monkeypatch, counted)
    same, differing = compare_greedy_answers(engine.runner, [answer, answer], [full, reuse], 8)
    assert (same.ids, same.divergence.identical, same.divergence.mean_kl) == (answer[0], True, pytest.approx(0))
    assert (differing.ids, differing.divergence.identical) == (other[0], False)
    assert decoded == [reuse]
    [undecoded] = compare_greedy_answers(engine.runner, [answer], [reuse], 8, decode=False)
    assert (undecoded.ids, undecoded.divergence) == (None, differing.divergence)
    assert decoded == [reuse]


def test_the_divergence_is_the_sum_over_tokens() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert divergence(logits, logits) == 0
    assert divergence(logits, logits + 3) == pytest.approx(0, abs=1e-12)
    found = divergence(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log())
    assert found == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert divergence(torch.tensor([-INF, 1.0, 1.0]), torch.tensor([-INF, 2.0, 2.0])) == pytest.approx(0)
    no_number = torch.tensor([1.0, NAN])
    assert math.isnan(divergence(torch.ones(2), no_number))
    assert math.isnan(divergence(no_number, torch.ones(2)))
