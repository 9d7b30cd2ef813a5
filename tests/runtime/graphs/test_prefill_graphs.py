"""Recorded passes give the results of the original passes; other passes are launched kernel by kernel.

Without a CUDA device, the recorders of `tests.support.recorders` replace CUDA graphs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SamplingParams, make_method
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.cost import MeasuredCosts
from qcfuse_rag.runtime.forward import forward_hidden, forward_rows
from qcfuse_rag.runtime.fused_layers.fused_modules import fused_view_first
from qcfuse_rag.runtime.graphs.recorder import Recorder
from qcfuse_rag.runtime.graphs.runners import ROWS, PrefillRunner
from qcfuse_rag.runtime.model_views import HookedLayer
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.runner import TransferOpener
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED
from tests.support import seams
from tests.support.damage import damaged
from tests.support.engines import make_engine
from tests.support.families import build_model, build_nested_model
from tests.support.passages import PASSAGES, QUESTION
from tests.support.recorders import DEVICE, AgainAndAgain, CountingRecorder, Failing, Remembering
from tests.support.runners import loading_first

pytest.importorskip("triton")

FAMILIES = ["llama", "gemma2-softcap", "gemma3-two-ropes", "qwen3-qk-norm", "cohere2-interleaved", "nested"]
if DEVICE.type == "cpu":  # on a GPU its experts wait for the device, which cannot be recorded
    FAMILIES.append("gpt-oss-sinks")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.recorder_has_kernels(monkeypatch, lambda *_: True)
    if DEVICE.type == "cpu":
        seams.large_blocks(monkeypatch)


def model_of(family: str, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    model = build_nested_model(layers=2) if family == "nested" else build_model(family, num_hidden_layers=2)
    return LanguageModel.wrap(model.to(DEVICE), tokenizer)


def two_buffers(lm: LanguageModel, capacity: int) -> tuple[KVBuffer, KVBuffer]:
    """Two buffers with the same random keys and values."""
    first, second = (lm.empty_buffer(capacity) for _ in range(2))
    for tensor, copied in zip((*first.keys, *first.values), (*second.keys, *second.values), strict=True):
        copied.copy_(tensor.normal_())
    return first, second


def agree(first: KVBuffer, second: KVBuffer) -> bool:
    pairs = zip((*first.keys, *first.values), (*second.keys, *second.values), strict=True)
    return all(torch.allclose(*pair, **CLOSE) for pair in pairs)


def on_device(*numbers: int) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_pass_is_the_pass(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """With as many rows as were recorded and with fewer, anywhere in a prompt of any length, in any buffer."""
    lm, recorder = model_of(family, tokenizer), CountingRecorder()
    passes = PrefillRunner(lm, recorder, fused_view_first)
    passes.compile(rows=(4, 8))
    assert passes.refusal is None
    assert recorder.recorded == 2 * lm.n_layers
    compared = passes.replayed
    for rows in ([0, 1, 2, 9], [5, 70, 71, 72, 90, 99], [3, 4, 5, 6, 7, 8, 9, 120], [30]):
        ids, at, before = torch.arange(7, 7 + len(rows), device=DEVICE), on_device(*rows), recorder.replayed
        launch_buffer, replay_buffer = two_buffers(lm, rows[-1] + 5)
        plan = RowsPlan.of(at, lm.sliding)
        expected, result = forward_rows(lm, ids, plan, launch_buffer), passes.logits(ids, plan, replay_buffer)
        assert recorder.replayed == before + lm.n_layers
        assert torch.allclose(result, expected, **CLOSE)
        assert agree(replay_buffer, launch_buffer)
    assert passes.replayed == compared + 4


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap"])
def test_a_probe_observes_the_same_in_a_recorded_pass(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of(family, tokenizer), CountingRecorder()
    passes = PrefillRunner(lm, recorder)
    passes.compile(rows=(8,))
    before, depth = recorder.replayed, lm.n_layers - 1
    launch_buffer, replay_buffer = two_buffers(lm, 60)
    seen: list[list[tuple[object, ...]]] = []
    for compute, buffer in ((passes.hidden, replay_buffer), (None, launch_buffer)):
        seen.append([])

        def observe(layer: int, query: Tensor, key: Tensor, *settings: object) -> None:
            seen[-1].append((layer, query.clone(), key.clone(), *settings))

        plan = RowsPlan(on_device(20, 40, 41, 42, 43), 44, observe=observe, windows=lm.sliding)
        if compute is None:
            forward_hidden(lm, on_device(1, 2, 3, 4, 5), plan, buffer, depth=depth)
        else:
            compute(on_device(1, 2, 3, 4, 5), plan, buffer, depth=depth)
    assert recorder.replayed == before + depth
    assert [layer for layer, *_ in seen[0]] == list(range(depth))
    for replayed, launched in zip(*seen, strict=True):
        assert replayed[3:] == launched[3:]
        for result, expected in zip(replayed[1:3], launched[1:3], strict=True):
            assert isinstance(result, Tensor)
            assert isinstance(expected, Tensor)
            assert result.shape == expected.shape
            assert torch.allclose(result, expected, **CLOSE)
    assert agree(replay_buffer, launch_buffer)


@pytest.fixture(scope="module")
def recorded(tokenizer: PreTrainedTokenizerFast) -> tuple[FusionEngine, CountingRecorder]:
    """An engine with recorded passes, and a recorder that counts the layers replayed."""
    engine, recorder = make_engine(model_of("llama", tokenizer), MemoryStore()), CountingRecorder()
    engine.warm(PASSAGES, bases=(FRAMED,))
    engine.runner.prefills = PrefillRunner(engine.lm, recorder)
    with pytest.MonkeyPatch.context() as patched:
        seams.recorder_has_kernels(patched, lambda *_: True)
        if DEVICE.type == "cpu":
            seams.large_blocks(patched)
        engine.runner.prefills.compile(rows=(16, 64))
    assert engine.runner.prefills.refusal is None
    return engine, recorder


@pytest.mark.parametrize("method", ["prophetkv", "epic", "qcfuse", "relaxkv", "full"])
def test_answers_are_the_same_with_recorded_passes(
    method: str, recorded: tuple[FusionEngine, CountingRecorder]
) -> None:
    """If either the probe or the pass cannot be recorded, the other is; for full prefill neither is."""
    engine, recorder = recorded
    prompt = engine.prompt(QUESTION, PASSAGES[:2])
    chosen = make_method(method) if method == "full" else make_method(method, ratio=0.2, base=FRAMED)
    expected, before = fuse_prompt(loading_first(engine.lm, engine.store), prompt, chosen), recorder.replayed
    result = engine.prefill(prompt, method=chosen)
    assert (recorder.replayed > before) == (method != "full")
    assert result.report.selected == expected.report.selected
    assert result.report.row_layers == expected.report.row_layers
    assert torch.allclose(result.logits, expected.logits, **CLOSE)


def test_an_exact_answer_is_healed_by_recorded_passes(recorded: tuple[FusionEngine, CountingRecorder]) -> None:
    engine, recorder = recorded
    prompt, params, before = engine.prompt(QUESTION, PASSAGES[:2]), SamplingParams(max_new_tokens=4), recorder.replayed
    exact = replace(params, fidelity="exact")
    result = engine.generate(prompt, exact, method=make_method("epic", ratio=0.2, base=FRAMED))
    assert recorder.replayed > before + 1, "the prefill, and passes that heal"
    assert result.ids == engine.generate(prompt, params, method=make_method("full")).ids


def test_each_layer_waits_for_its_stored_data(tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of("llama", tokenizer), CountingRecorder()
    passes = PrefillRunner(lm, recorder)
    passes.compile(rows=(4,))
    launch_buffer, stored = two_buffers(lm, 30)
    replay_buffer = lm.empty_buffer(30)
    for tensor in (*replay_buffer.keys, *replay_buffer.values):
        tensor.fill_(torch.nan)
    before, arrived = recorder.replayed, []

    def wait_for_layer(layer: int) -> None:
        assert recorder.replayed == before + layer
        arrived.append(layer)
        for target, source in ((replay_buffer.keys, stored.keys), (replay_buffer.values, stored.values)):
            target[layer].copy_(source[layer])

    plan, ids = RowsPlan.of(on_device(10, 11, 29), lm.sliding), on_device(1, 2, 3)
    result = passes.logits(ids, plan, replace(replay_buffer, wait_for_layer=wait_for_layer))
    assert arrived == list(range(lm.n_layers))
    assert torch.allclose(result, forward_rows(lm, ids, plan, launch_buffer), **CLOSE)
    assert agree(replay_buffer, launch_buffer)


def test_a_chunk_found_damaged_in_a_recorded_pass_is_computed(
    recorded: tuple[FusionEngine, CountingRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = recorded
    [key] = engine.corpus.keys(engine.prompts.chunk_ids(PASSAGES[1]), (FRAMED,))
    chunk = engine.store.get(key)
    assert isinstance(chunk, ChunkKV)

    broken, get, before = damaged(chunk, "value.1"), engine.store.get, recorder.replayed
    monkeypatch.setattr(engine.store, "get", lambda wanted: broken if wanted == key else get(wanted))
    monkeypatch.setattr(engine.store, "discard", lambda key, reason: None)  # other tests share the store
    prompt, method = engine.prompt(QUESTION, PASSAGES[:2]), make_method("reuse", base=FRAMED)
    result = engine.prefill(prompt, method=method)
    assert recorder.replayed > before
    assert [lookup.hit for lookup in result.report.lookups] == [True, True, False]
    expected = fuse_prompt(loading_first(engine.lm, engine.store), prompt, method)
    assert result.report.lookups == expected.report.lookups
    assert torch.allclose(result.logits, expected.logits, **CLOSE)


def test_while_one_pass_runs_recorded_layers_others_are_launched(tokenizer: PreTrainedTokenizerFast) -> None:
    """A recorded pass waits for its store between layers; other passes do not wait for it."""
    lm, recorder = model_of("llama", tokenizer), CountingRecorder()
    passes = PrefillRunner(lm, recorder)
    passes.compile(rows=(4,))
    waits, goes_on = threading.Event(), threading.Event()
    plan, ids = RowsPlan.of(on_device(10, 11, 19), lm.sliding), on_device(1, 2, 3)
    (launch_buffer, replay_buffer), (_, slow) = two_buffers(lm, 20), two_buffers(lm, 20)
    slow_other = KVBuffer(tuple(key.clone() for key in slow.keys), tuple(value.clone() for value in slow.values))
    result: list[Tensor] = []

    def wait_for_layer(layer: int) -> None:
        if layer == 1:
            waits.set()
            assert goes_on.wait(60)

    first = threading.Thread(
        target=lambda: result.append(passes.logits(ids, plan, replace(slow, wait_for_layer=wait_for_layer)))
    )
    first.start()
    assert waits.wait(60)
    before = recorder.replayed
    assert torch.allclose(passes.logits(ids, plan, replay_buffer), forward_rows(lm, ids, plan, launch_buffer), **CLOSE)
    assert recorder.replayed == before
    goes_on.set()
    first.join(60)
    assert torch.allclose(result[0], forward_rows(lm, ids, plan, slow_other), **CLOSE)


def test_passes_that_fit_no_recording_are_launched(tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of("llama", tokenizer), CountingRecorder()
    passes = PrefillRunner(lm, recorder)
    passes.compile(rows=(4,))
    before = recorder.replayed
    shifted = [torch.empty(key.numel() + 1, device=DEVICE)[1:].view(key.shape) for key in two_buffers(lm, 9)[0].keys]
    cases = {
        "more rows": (on_device(1, 2, 3, 4, 8), {}, None),
        "every row": (on_device(0, 1, 2), {}, None),
        "sets of visible keys": (on_device(5, 8), {"visible": [on_device(0, 5, 8)] * lm.n_layers}, None),
        "a buffer that is not aligned": (on_device(5, 8), {}, shifted),
    }
    for name, (rows, options, keys) in cases.items():
        launch_buffer, replay_buffer = two_buffers(lm, 9)
        if keys is not None:
            for target, source in zip(keys, replay_buffer.keys, strict=True):
                target.copy_(source)
            replay_buffer = KVBuffer(tuple(keys), replay_buffer.values)
        plan = RowsPlan(rows, int(rows[-1]) + 1, windows=lm.sliding, **options)  # type: ignore[arg-type]
        result, expected = passes.logits(rows, plan, replay_buffer), forward_rows(lm, rows, plan, launch_buffer)
        assert torch.allclose(result, expected, **CLOSE), name
        assert recorder.replayed == before, name


class Spoiling(AgainAndAgain):
    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        def spoil() -> None:
            compute().fill_(torch.nan)

        return compute(), spoil


def test_a_model_that_gives_its_layers_other_inputs_is_launched(tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of("llama", tokenizer), CountingRecorder()
    passes = PrefillRunner(lm, recorder)
    passes.compile(rows=(4,))
    before = recorder.replayed
    launch_buffer, replay_buffer = two_buffers(lm, 9)
    plan, ids = RowsPlan.of(on_device(2, 8), lm.sliding), on_device(1, 2)
    expected = forward_rows(lm, ids, plan, launch_buffer)
    rotary, made = lm.model.get_decoder().rotary_emb, []

    def doubled(module: object, inputs: object, result: tuple[Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        made.append(result)
        return (*result, result[0]) if len(made) == 1 else None

    with rotary.register_forward_hook(doubled):  # type: ignore[union-attr]
        result = passes.logits(ids, plan, replay_buffer)
    assert len(made) == 2
    assert recorder.replayed == before
    assert torch.allclose(result, expected, **CLOSE)


class Forgetful(AgainAndAgain):
    """Records a model's layers; the replay of the second one does nothing."""

    def __init__(self) -> None:
        self.seen = 0

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result, again = super().record(compute)
        self.seen += 1
        return (result, lambda: None) if self.seen == 2 else (result, again)


class FullAt(AgainAndAgain):
    """Has no memory for passes of this number of rows or more."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result, again = super().record(compute)
        if result.shape[1] >= self.rows:
            raise torch.OutOfMemoryError("no room")
        return result, again


def test_without_memory_for_many_rows_fewer_are_recorded(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    lm = model_of("llama", tokenizer)
    passes = PrefillRunner(lm, FullAt(8))
    with caplog.at_level(logging.WARNING):
        passes.compile(rows=(4, 8, 16))
    assert passes.refusal is None
    for size in (16, 8):
        assert f"{size}: recording failed: OutOfMemoryError: no room" in caplog.text
    compared = passes.replayed
    for rows, replayed in ((on_device(2, 8), 1), (on_device(1, 2, 3, 4, 8), 0)):
        launch_buffer, replay_buffer = two_buffers(lm, 9)
        plan = RowsPlan.of(rows, lm.sliding)
        assert torch.allclose(
            passes.logits(rows, plan, replay_buffer), forward_rows(lm, rows, plan, launch_buffer), **CLOSE
        )
        assert passes.replayed == compared + replayed
        compared = passes.replayed


def test_without_memory_to_check_kernels_nothing_is_recorded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise torch.OutOfMemoryError("no room")

    seams.recorder_has_kernels(monkeypatch, lambda *_: False)
    seams.recorder_refusal(monkeypatch, full)
    passes = PrefillRunner(model_of("llama", tokenizer), AgainAndAgain())
    passes.compile(rows=(4,))
    assert passes.refusal == "the kernels cannot be tried: the device is out of memory"


def test_recorded_passes_are_priced_once_they_are_timed(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = model_of("llama", tokenizer)
    passes = PrefillRunner(lm, AgainAndAgain())
    measured = MeasuredCosts(lm, MemoryStore(), passes, TransferOpener(lm))
    passes.compile(rows=(16,))
    assert measured().recorded_rows == 0
    measured.recorded_pass_s = 0.01
    assert (measured().recorded_rows, measured().recorded_pass_s) == (16, 0.01)


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (Failing(), "recording failed: RuntimeError: called"),
        (Remembering(), "differs from the original by"),
        (Spoiling(), "differs from the original by nan"),
        (Forgetful(), "differs from the original by"),
    ],
    ids=["failing", "remembering", "spoiling", "forgetful"],
)
def test_passes_that_cannot_be_recorded_are_launched_and_the_reason_is_logged(
    recorder: Recorder, reason: str, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    lm = model_of("llama", tokenizer)
    passes = PrefillRunner(lm, recorder)
    assert "compile" in str(passes.refusal)
    with caplog.at_level(logging.WARNING):
        passes.compile(rows=(4,))
    assert reason in str(passes.refusal)
    assert reason in caplog.text
    launch_buffer, replay_buffer = two_buffers(lm, 9)
    plan, ids = RowsPlan.of(on_device(2, 8), lm.sliding), on_device(1, 2)
    assert torch.equal(passes.logits(ids, plan, replay_buffer), forward_rows(lm, ids, plan, launch_buffer))


def test_without_kernels_nothing_is_recorded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.recorder_has_kernels(monkeypatch, lambda *_: False)
    recorder = CountingRecorder()
    passes = PrefillRunner(model_of("llama", tokenizer), recorder)
    passes.compile()
    assert recorder.recorded == 0
    assert "there are no kernels" in str(passes.refusal)


def test_recorded_numbers_of_rows_leave_few_extra_rows() -> None:
    assert list(ROWS) == sorted(ROWS)
    for fewer, more in pairwise(ROWS):
        assert fewer < 128 or more * 3 <= (fewer + 1) * 4
        assert fewer < 512 or more * 6 <= (fewer + 1) * 7


def test_views_of_the_model_are_made_once(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, made = model_of("llama", tokenizer), []
    passes = PrefillRunner(lm, CountingRecorder())
    passes.compile(rows=(4,))

    def making(*args: Any) -> HookedLayer:
        made.append(args[1])
        return HookedLayer(*args)

    seams.hooked_layer(monkeypatch, making)
    buffer, _ = two_buffers(lm, 20)
    plan, ids = RowsPlan.of(on_device(3, 19), lm.sliding), on_device(5, 6)
    before = passes.replayed
    for _ in range(3):
        passes.logits(ids, plan, buffer)
        passes.hidden(ids, plan, buffer, depth=1)
    assert passes.replayed == before + 6
    assert made == [0]  # only for the first layer, by the first pass that ends after it


def test_a_view_with_other_results_is_not_recorded(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = model_of("llama", tokenizer)
    other = LanguageModel.wrap(build_model("llama", seed=1, num_hidden_layers=2).to(DEVICE), tokenizer)
    offered = iter([other.model, lm.model])
    passes = PrefillRunner(lm, CountingRecorder(), lambda model: offered)
    passes.compile(rows=(8,))
    assert passes.refusal is None
    assert next(offered, None) is None, "both were tried"


def test_passes_that_do_not_write_their_keys_are_not_recorded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.KERNELS["append"](monkeypatch, lambda *_: None)
    passes = PrefillRunner(model_of("llama", tokenizer), CountingRecorder())
    passes.compile(rows=(8,))
    assert "differs from the original by nan" in str(passes.refusal)
