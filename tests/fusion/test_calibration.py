"""A calibrated method corrects its readers while something is not exact, and never where everything is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, SamplingParams, make_method
from qcfuse_rag.fusion.calibration import Calibration
from qcfuse_rag.fusion.healing import Healing
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.generation.sampling import Fidelity
from qcfuse_rag.generation.teacher_forcing import answer_logits, greedy_answer
from qcfuse_rag.runtime.step_costs import StepCosts
from qcfuse_rag.store.key import hash_ids
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.verification.calibration import fit_calibration, passage_odds
from tests.support.engines import make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import plain_forward

REUSE = make_method("reuse", base=FRAMED)
FULL = make_method("full")
ANSWER = (40, 41, 42, 43, 44)


@pytest.fixture
def engine(main_family: LanguageModel) -> FusionEngine:
    return make_warmed_engine(main_family)


def calibrated(engine: FusionEngine, method: Method = REUSE, scale: float = 1.0) -> Method:
    """Return a method with random biases for the engine's model and wording."""
    heads = engine.lm.model.config.num_attention_heads
    biases = scale * torch.randn(engine.lm.n_layers, heads, generator=torch.Generator().manual_seed(0))
    numbers = tuple(tuple(layer) for layer in biases.tolist())
    return replace(method, calibration=Calibration(numbers, hash_ids(engine.prompts.prefix_ids)))


def test_a_bias_of_zero_changes_nothing_and_another_bias_does(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    plain = engine.prefill(prompt, method=REUSE).logits
    assert float((engine.prefill(prompt, method=calibrated(engine, scale=0.0)).logits - plain).abs().max()) < 1e-4
    assert float((engine.prefill(prompt, method=calibrated(engine)).logits - plain).abs().max()) > 1e-3


def test_decode_steps_read_as_the_prefill_does(engine: FusionEngine) -> None:
    """Step by step gives what one pass over the whole answer gives."""
    prefilled = engine.prefill(engine.prompt(QUESTION, PASSAGES), method=calibrated(engine), answer_tokens=6)
    ids, steps = greedy_answer(engine.runner, prefilled, 6)
    assert float((answer_logits(engine.runner, prefilled, ids) - steps).abs().max()) < 1e-4


def test_healing_ends_without_a_bias(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    prefilled = engine.prefill(prompt, method=calibrated(engine), answer_tokens=len(ANSWER))
    healing = Healing(engine.runner, prefilled)
    while healing.prompt_left:
        healing.advance([], 13)
    logits = healing.finish(ANSWER)
    expected, _ = plain_forward(engine.lm, prompt.ids + ANSWER)
    assert healing.buffer.reader_bias is None
    assert float((logits - expected[len(prompt) - 1 :]).abs().max()) < 1e-4


@pytest.mark.parametrize("fidelity", ["heal", "exact"])
def test_a_healed_answer_goes_on_without_a_bias(
    engine: FusionEngine, fidelity: Fidelity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token after the first is chosen over an exact cache, and the stream's buffer is as exact."""
    monkeypatch.setattr(engine.runner, "step_costs", lambda: StepCosts(1.0, 0.0, 1e-4))
    prompt = engine.prompt(QUESTION, PASSAGES)
    params = SamplingParams(max_new_tokens=8, fidelity=fidelity)
    stream = engine.stream(prompt, params, method=calibrated(engine, scale=5.0))
    ids = stream.result().ids
    assert stream.prefilled.buffer.reader_bias is None
    expected, _ = plain_forward(engine.lm, prompt.ids + ids[:-1])
    assert list(ids[1:]) == expected[len(prompt) :].argmax(-1).tolist()
    if len(ids) > 1:
        after = engine.runner.decodes([ids[-2]], [len(prompt) + len(ids) - 2], [stream.prefilled.buffer])[0]
        assert float((after - expected[-1]).abs().max()) < 1e-4


def test_with_everything_recomputed_it_is_full_prefill(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    everything = calibrated(engine, make_method("qcfuse", ratio=1.0, base=FRAMED))
    prefilled = engine.prefill(prompt, method=everything)
    assert prefilled.buffer.reader_bias is None
    full = engine.prefill(prompt, method=FULL)
    assert float((prefilled.logits - full.logits).abs().max()) < 1e-4


def test_another_wording_or_model_is_not_corrected(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    method = calibrated(engine)
    assert method.calibration is not None
    for calibration in (
        replace(method.calibration, prefix="another"),
        replace(method.calibration, biases=method.calibration.biases[:-1]),
    ):
        prefilled = engine.prefill(prompt, method=replace(method, calibration=calibration))
        assert prefilled.buffer.reader_bias is None


def test_the_bias_is_the_mean_gap_of_the_log_odds(engine: FusionEngine) -> None:
    """Two prompts; in the first layer, which no earlier bias changes, that gives readers full prefill's odds."""
    gaps, full_odds, fused_odds = [], [], []
    for question in (QUESTION, "What colour is the hull?"):
        prompt = engine.prompt(question, PASSAGES)
        full = engine.prefill(prompt, method=FULL, answer_tokens=len(ANSWER))
        fused = engine.prefill(prompt, method=REUSE, answer_tokens=len(ANSWER))
        bias = engine.prefill(prompt, method=calibrated(engine)).buffer.reader_bias
        assert bias is not None
        assert bias.start == prompt.chunks[1].start, "the first passage is exact"
        for odds, prefilled in ((full_odds, full), (fused_odds, fused)):
            odds.append(passage_odds(engine.lm, prompt, prefilled.buffer, ANSWER, bias.start))
        gaps.append(full_odds[-1] - fused_odds[-1])
    calibration = fit_calibration(engine.prompts.prefix_ids, full_odds, fused_odds)
    assert torch.allclose(torch.tensor(calibration.biases), (gaps[0] + gaps[1]) / 2, atol=1e-3)
    assert float(torch.tensor(calibration.biases).abs().max()) > 1e-2
    prefilled = engine.prefill(prompt, method=replace(REUSE, calibration=calibration))
    assert prefilled.buffer.reader_bias is not None
