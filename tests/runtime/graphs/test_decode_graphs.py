"""Recorded decode steps give the results of the original steps; other steps are launched kernel by kernel.

Without a CUDA device, the recorders of `tests.support.recorders` replace CUDA graphs.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel, MemoryStore, SamplingParams, Scheduler, make_method
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_step
from qcfuse_rag.runtime.fused_layers.fused_modules import fused_view_first
from qcfuse_rag.runtime.graphs.recorder import Recorder
from qcfuse_rag.runtime.graphs.runners import DecodeRunner
from qcfuse_rag.store.key import FRAMED
from tests.support import seams
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION
from tests.support.recorders import DEVICE, Breaking, CountingRecorder, Failing, Nonsense, Remembering

pytest.importorskip("triton")

FAMILIES = ["llama", "gemma2-softcap", "qwen3-qk-norm"]
if DEVICE.type == "cpu":  # on a GPU its experts wait for the device, which cannot be recorded
    FAMILIES.append("gpt-oss-sinks")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.steps_have_kernels(monkeypatch, lambda *_: True)
    seams.recorder_has_kernels(monkeypatch, lambda *_: True)
    seams.decode_trial_lengths(monkeypatch, (5, 6, 70))
    if DEVICE.type == "cpu":
        seams.large_blocks(monkeypatch)


def model_of(family: str, tokenizer: PreTrainedTokenizerFast, layers: int = 2) -> LanguageModel:
    return LanguageModel.wrap(build_model(family, num_hidden_layers=layers).to(DEVICE), tokenizer)


def random_buffers(lm: LanguageModel, capacities: list[int]) -> list[KVBuffer]:
    buffers = [lm.empty_buffer(capacity) for capacity in capacities]
    for buffer in buffers:
        for tensor in (*buffer.keys, *buffer.values):
            tensor.normal_()
    return buffers


def copies(buffers: list[KVBuffer]) -> list[KVBuffer]:
    return [
        KVBuffer(tuple(key.clone() for key in buffer.keys), tuple(value.clone() for value in buffer.values))
        for buffer in buffers
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_is_the_step(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """For as many requests as it was recorded for and for fewer, at any position, in any buffers."""
    lm, recorder = model_of(family, tokenizer), CountingRecorder()
    steps = DecodeRunner(lm, recorder, fused_view_first)
    steps.compile(requests=(1, 3) if family == "llama" else (3,))
    assert steps.refusal is None
    for positions in ([40], [70, 0], [50, 3, 20]):
        buffers = random_buffers(lm, [position + 5 for position in positions])
        expected_buffers, before = copies(buffers), recorder.replayed
        tokens = list(range(7, 7 + len(positions)))
        expected, result = forward_step(lm, tokens, positions, expected_buffers), steps(tokens, positions, buffers)
        assert recorder.replayed == before + 1
        assert torch.allclose(result, expected, rtol=1e-4, atol=1e-4)
        for buffer, other in zip(buffers, expected_buffers, strict=True):
            pairs = zip((*buffer.keys, *buffer.values), (*other.keys, *other.values), strict=True)
            assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in pairs)


def test_more_requests_than_were_recorded_are_launched_kernel_by_kernel(tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of("llama", tokenizer), CountingRecorder()
    steps = DecodeRunner(lm, recorder)
    steps.compile(requests=(1,))
    before, buffers = recorder.replayed, random_buffers(lm, [8, 8])
    assert torch.equal(steps([1, 2], [4, 5], buffers), forward_step(lm, [1, 2], [4, 5], copies(buffers)))
    assert recorder.replayed == before


def test_answers_are_the_same_with_recorded_steps(tokenizer: PreTrainedTokenizerFast) -> None:
    engine, recorder = make_engine(model_of("llama", tokenizer), MemoryStore()), CountingRecorder()
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompts = [engine.prompt(question, PASSAGES) for question in (QUESTION, "Why?")]
    params, method = SamplingParams(max_new_tokens=4), make_method("qcfuse", ratio=0.3, base=FRAMED)
    expected = [engine.generate(prompt, params, method=method).ids for prompt in prompts]
    engine.runner.decodes = DecodeRunner(engine.lm, recorder)
    engine.runner.decodes.compile(requests=(2,))
    before = recorder.replayed
    assert [engine.generate(prompt, params, method=method).ids for prompt in prompts] == expected
    with Scheduler(engine) as scheduler:
        answers = [scheduler.submit(prompt, params, method=method) for prompt in prompts]
        assert [answer.result(60).ids for answer in answers] == expected
    assert recorder.replayed > before


def test_threads_share_recorded_steps(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = model_of("llama", tokenizer)
    steps = DecodeRunner(lm, CountingRecorder())
    steps.compile(requests=(1,))
    assert steps.refusal is None
    buffers = random_buffers(lm, [12, 20, 30])
    expected = [forward_step(lm, [at], [5 + at], copies([buffer])) for at, buffer in enumerate(buffers)]
    right: list[bool] = []

    def ask(at: int) -> None:
        for _ in range(2):
            logits = steps([at], [5 + at], [buffers[at]])
            right.append(torch.allclose(logits, expected[at], rtol=1e-4, atol=1e-4))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, range(3)))
    assert right == [True] * 6


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (Failing(), "recording failed: RuntimeError: called"),
        (Remembering(), "differs from the original by"),
        (Nonsense(), "differs from the original by nan"),
    ],
    ids=["failing", "remembering", "nonsense"],
)
def test_steps_that_cannot_be_recorded_are_launched_and_the_reason_is_logged(
    recorder: Recorder, reason: str, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    lm = model_of("llama", tokenizer)
    steps = DecodeRunner(lm, recorder)
    assert "compile" in str(steps.refusal)
    with caplog.at_level(logging.WARNING):
        steps.compile(requests=(1,))
    assert reason in str(steps.refusal)
    assert reason in caplog.text
    [buffer] = random_buffers(lm, [8])
    assert torch.equal(steps([1], [4], [buffer]), forward_step(lm, [1], [4], copies([buffer])))


def test_without_kernels_nothing_is_recorded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.recorder_has_kernels(monkeypatch, lambda *_: False)
    recorder = CountingRecorder()
    steps = DecodeRunner(model_of("llama", tokenizer), recorder)
    steps.compile()
    assert recorder.recorded == 0
    assert "there are no kernels" in str(steps.refusal)


def test_a_view_with_other_results_is_not_recorded(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = model_of("llama", tokenizer)
    other = LanguageModel.wrap(build_model("llama", seed=1, num_hidden_layers=2).to(DEVICE), tokenizer)
    steps = DecodeRunner(lm, CountingRecorder(), lambda model: [other.model, model])
    steps.compile(requests=(1,))
    assert steps.refusal is None
    assert steps.model is lm.model


def test_after_a_recording_that_failed_half_way_nothing_is_recorded(tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of("llama", tokenizer), Breaking()
    steps = DecodeRunner(lm, recorder, lambda model: [model, model])
    steps.compile(requests=(1, 2))
    assert recorder.asked == 1
    assert "it ended half way" in str(steps.refusal)
    [buffer] = random_buffers(lm, [8])
    assert torch.equal(steps([1], [4], [buffer]), forward_step(lm, [1], [4], copies([buffer])))


def test_steps_that_do_not_write_their_keys_are_not_recorded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.KERNELS["append"](monkeypatch, lambda *_: None)
    steps = DecodeRunner(model_of("llama", tokenizer), CountingRecorder())
    steps.compile(requests=(1,))
    assert "differs from the original by nan" in str(steps.refusal)
