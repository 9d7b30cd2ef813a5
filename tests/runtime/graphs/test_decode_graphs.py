"""Recorded decode steps: the step itself, whoever's turn it is; what cannot be recorded is computed as ever.

Where there is no CUDA device, see `tests.support.recorders` for what stands for a recording.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel, MemoryStore, SamplingParams, Scheduler, make_method
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.decode_step import forward_step
from qcfuse_rag.runtime.graphs.decode_graphs import DecodeRunner
from qcfuse_rag.runtime.graphs.recorder import Recorder
from qcfuse_rag.runtime.model_views import ModuleProxy
from qcfuse_rag.store.prefill_base import FRAMED
from tests.support import seams
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION
from tests.support.recorders import DEVICE, Breaking, CountingRecorder, Failing, Nonsense, Remembering, leanest_alone

pytest.importorskip("triton")

FAMILIES = ["llama", "gemma2-softcap", "qwen3-qk-norm"]
if DEVICE.type == "cpu":  # on a GPU its experts wait for the device, which cannot be recorded
    FAMILIES.append("gpt-oss-sinks")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.steps_have_kernels(monkeypatch, lambda *given: True)
    seams.recorder_has_kernels(monkeypatch, lambda *given: True)
    seams.decode_trial_lengths(monkeypatch, (5, 6, 70))
    seams.decode_trial_steps(monkeypatch, 1)
    seams.decode_views(monkeypatch, lambda model: {"model": model})  # the interpreter is slow


def model_of(family: str, tokenizer: PreTrainedTokenizerFast, layers: int = 2) -> LanguageModel:
    return LanguageModel.wrap(build_model(family, num_hidden_layers=layers).to(DEVICE), tokenizer)


def random_buffers(lm: LanguageModel, capacities: list[int]) -> list[KVBuffer]:
    buffers = [KVBuffer.allocate(lm.shapes, one, dtype=lm.dtype, device=lm.device) for one in capacities]
    for buffer in buffers:
        for held in (*buffer.keys, *buffer.values):
            held.normal_()
    return buffers


def copies(buffers: list[KVBuffer]) -> list[KVBuffer]:
    return [
        KVBuffer(tuple(one.clone() for one in buffer.keys), tuple(one.clone() for one in buffer.values))
        for buffer in buffers
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_is_the_step(
    family: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as many requests as it was recorded for and for fewer, at any position, in any buffers."""

    seams.decode_views(monkeypatch, leanest_alone)
    lm, recorder = model_of(family, tokenizer), CountingRecorder()
    steps = DecodeRunner(lm, recorder)
    steps.compile(requests=(1, 3) if family == "llama" else (3,))
    assert steps.refusal is None
    for positions in ([40], [70, 0], [50, 3, 20]):
        theirs = random_buffers(lm, [position + 5 for position in positions])
        ours, before = copies(theirs), recorder.replayed
        tokens = list(range(7, 7 + len(positions)))
        expected, found = forward_step(lm, tokens, positions, theirs), steps(tokens, positions, ours)
        assert recorder.replayed == before + 1
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
        for mine, other in zip(ours, theirs, strict=True):
            pairs = zip((*mine.keys, *mine.values), (*other.keys, *other.values), strict=True)
            assert all(torch.allclose(one, two, rtol=1e-4, atol=1e-4) for one, two in pairs)


def test_more_requests_than_were_recorded_are_computed_as_ever(tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of("llama", tokenizer), CountingRecorder()
    steps = DecodeRunner(lm, recorder)
    steps.compile(requests=(1,))
    before, buffers = recorder.replayed, random_buffers(lm, [8, 8])
    assert torch.equal(steps([1, 2], [4, 5], buffers), forward_step(lm, [1, 2], [4, 5], copies(buffers)))
    assert recorder.replayed == before


def test_answers_are_the_same_with_recorded_steps(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
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


def test_threads_take_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = model_of("llama", tokenizer)
    steps = DecodeRunner(lm, CountingRecorder())
    steps.compile(requests=(1,))
    assert steps.refusal is None
    buffers = random_buffers(lm, [12, 20, 30])
    expected = [forward_step(lm, [at], [5 + at], copies([buffer])) for at, buffer in enumerate(buffers)]
    right: list[bool] = []

    def ask(at: int) -> None:
        for _ in range(2):
            found = steps([at], [5 + at], [buffers[at]])
            right.append(torch.allclose(found, expected[at], rtol=1e-4, atol=1e-4))

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 6


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (Failing(), "cannot be recorded: RuntimeError: called"),
        (Remembering(), "are off by"),
        (Nonsense(), "are off by nan"),
    ],
    ids=["failing", "remembering", "nonsense"],
)
def test_what_cannot_be_recorded_is_computed_as_ever_and_said(
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
    seams.recorder_has_kernels(monkeypatch, lambda *given: False)
    recorder = CountingRecorder()
    steps = DecodeRunner(model_of("llama", tokenizer), recorder)
    steps.compile()
    assert recorder.recorded == 0
    assert "there are no kernels" in str(steps.refusal)


def test_a_view_that_comes_out_otherwise_is_recorded_without(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = model_of("llama", tokenizer)
    other = LanguageModel.wrap(build_model("llama", seed=1, num_hidden_layers=2).to(DEVICE), tokenizer)
    seams.decode_views(monkeypatch, lambda model: {"other": other.model, "model": model})
    steps = DecodeRunner(lm, CountingRecorder())
    steps.compile(requests=(1,))
    assert steps.refusal is None
    assert steps.model is lm.model


class Slow(ModuleProxy):
    """Computes all four times."""

    def forward(self, **given: Any) -> Any:
        for _ in range(3):
            self.inner(**given)
        return self.inner(**given)


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_are_recorded_by_the_view_that_is_fastest(
    reverse: bool, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, recorder = model_of("llama", tokenizer, layers=1), CountingRecorder()
    views = {"slow": Slow(lm.model), "model": lm.model}
    offered = dict(sorted(views.items(), reverse=reverse))
    seams.decode_views(monkeypatch, lambda model: offered)
    seams.decode_trial_lengths(monkeypatch, (5,))
    seams.decode_trial_rounds(monkeypatch, 1)
    steps = DecodeRunner(lm, recorder)
    steps.compile(requests=(1, 2))
    assert steps.refusal is None
    assert steps.model is lm.model
    assert recorder.recorded == 2 * 2 + 2, "the fewest and the most of each view, and all of the fastest"
    assert steps.seconds.keys() == {"slow", "model"}
    for count in (1, 2):
        assert steps.seconds["slow"][count] > steps.seconds["model"][count] > 0
    [buffer] = random_buffers(lm, [8])
    assert torch.equal(steps([1], [4], [buffer]), forward_step(lm, [1], [4], copies([buffer])))


def test_a_view_that_cannot_be_timed_is_not_recorded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = model_of("llama", tokenizer)
    seams.decode_views(monkeypatch, lambda model: {"one": model, "model": model})

    def no_room(*_: object) -> float:
        raise torch.OutOfMemoryError("no room")

    steps = DecodeRunner(lm, CountingRecorder())
    monkeypatch.setattr(steps, "_seconds", no_room)
    steps.compile(requests=(1,))
    assert "no room" in str(steps.refusal)
    assert steps.model is lm.model
    [buffer] = random_buffers(lm, [8])
    assert torch.equal(steps([1], [4], [buffer]), forward_step(lm, [1], [4], copies([buffer])))


def test_after_a_recording_that_ended_half_way_none_is_made(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = model_of("llama", tokenizer)
    seams.decode_views(monkeypatch, lambda model: {"one": model, "model": model})
    recorder = Breaking()
    steps = DecodeRunner(lm, recorder)
    steps.compile(requests=(1, 2))
    assert recorder.asked == 1
    assert "it ended half way" in str(steps.refusal)
    [buffer] = random_buffers(lm, [8])
    assert torch.equal(steps([1], [4], [buffer]), forward_step(lm, [1], [4], copies([buffer])))
