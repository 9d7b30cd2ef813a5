"""Recorded passes and decode steps give the results of launched ones; what cannot be recorded is launched.

Without a CUDA device, the recorders of `tests.support.recorders` replace CUDA graphs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SamplingParams, Scheduler, make_method
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden, forward_rows, forward_step
from qcfuse_rag.runtime.fused_layers.fused_modules import fused_view
from qcfuse_rag.runtime.graphs.runners import ROWS, DecodeRunner, PrefillRunner
from qcfuse_rag.runtime.learned_costs import LearnedCosts
from qcfuse_rag.runtime.model_views import HookedLayer
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import FRAMED
from tests.support import seams
from tests.support.engines import damaged, loading_first, make_engine
from tests.support.families import build_model, build_nested_model
from tests.support.passages import PASSAGES, QUESTION
from tests.support.recorders import (
    DEVICE,
    AgainAndAgain,
    Breaking,
    CountingRecorder,
    Failing,
    Forgetful,
    FullAt,
    Remembering,
    Spoiling,
)

pytest.importorskip("triton")

STEP_FAMILIES = ["llama", "gemma2-softcap", "qwen3-qk-norm"]
FAMILIES = [*STEP_FAMILIES, "gemma3-two-ropes", "cohere2-interleaved", "nested"]
if DEVICE.type == "cpu":  # on a GPU its experts wait for the device, which cannot be recorded
    STEP_FAMILIES.append("gpt-oss-sinks")
    FAMILIES.append("gpt-oss-sinks")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
Runner = PrefillRunner | DecodeRunner
every_runner = pytest.mark.parametrize("kind", [PrefillRunner, DecodeRunner], ids=["passes", "steps"])


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.steps_have_kernels(monkeypatch, lambda *_: True)
    seams.recorder_has_kernels(monkeypatch, lambda *_: True)
    monkeypatch.setattr("qcfuse_rag.runtime.graphs.steps.CHECKED_POSITIONS", (5, 6, 70))
    if DEVICE.type == "cpu":
        seams.large_blocks(monkeypatch)


def model_of(family: str, tokenizer: PreTrainedTokenizerFast, *, fused: bool = False) -> LanguageModel:
    model = build_nested_model(num_hidden_layers=2) if family == "nested" else build_model(family, num_hidden_layers=2)
    lm = LanguageModel.wrap(model.to(DEVICE), tokenizer)
    if fused:
        lm.__dict__["fused_model"] = fused_view(lm.model)
    return lm


def recorded(kind: type[Any], lm: LanguageModel, recorder: Any, *sizes: int) -> Any:
    runner = kind(lm, recorder)
    runner.compile(sizes)
    return runner


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


def compare_passes(passes: PrefillRunner, lm: LanguageModel, rows: Sequence[int], **options: Any) -> None:
    """Check that a pass over rows gives what it gives when it is launched."""
    at, (launched, found) = on_device(*rows), two_buffers(lm, rows[-1] + 5)
    plan, ids = RowsPlan(at, rows[-1] + 1, windows=lm.sliding, **options), torch.arange(7, 7 + len(rows), device=DEVICE)
    result, expected = passes.logits(ids, plan, found), forward_rows(lm, ids, plan, launched)
    assert torch.allclose(result, expected, **CLOSE)
    assert agree(found, launched)


def compare_steps(steps: DecodeRunner, lm: LanguageModel, positions: list[int]) -> None:
    """Check that a step gives what it gives when it is launched."""
    pairs = [two_buffers(lm, position + 5) for position in positions]
    launched, found = ([pair[side] for pair in pairs] for side in (0, 1))
    tokens = list(range(7, 7 + len(positions)))
    result, expected = steps(tokens, positions, found), forward_step(lm, tokens, positions, launched)
    assert torch.allclose(result, expected, **CLOSE)
    assert all(agree(*pair) for pair in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_pass_is_the_pass(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """With as many rows as were recorded and with fewer, anywhere in a prompt of any length, in any buffer."""
    plain, recorder = model_of(family, tokenizer), CountingRecorder()
    passes = recorded(PrefillRunner, model_of(family, tokenizer, fused=True), recorder, 4, 8)
    assert passes.refusal is None
    assert recorder.recorded == 2 * plain.n_layers
    compared = passes.replayed
    for rows in ([0, 1, 2, 9], [5, 70, 71, 72, 90, 99], [3, 4, 5, 6, 7, 8, 9, 120], [30]):
        before = recorder.replayed
        compare_passes(passes, plain, rows)
        assert recorder.replayed == before + plain.n_layers
    assert passes.replayed == compared + 4


@pytest.mark.parametrize("family", ["gemma3n-shared-keys", "gemma4-shared-keys"])
def test_where_layers_share_keys_steps_are_recorded_and_passes_are_not(
    family: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = LanguageModel.wrap(build_model(family, num_hidden_layers=3, num_kv_shared_layers=1).to(DEVICE), tokenizer)
    passes = recorded(PrefillRunner, lm, CountingRecorder(), 4)
    assert passes.refusal is not None
    assert "read the keys and values of another" in passes.refusal
    compare_steps(recorded(DecodeRunner, lm, CountingRecorder(), 1, 2), lm, [70, 3])


@pytest.mark.parametrize("family", STEP_FAMILIES)
def test_a_recorded_step_is_the_step(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """For as many requests as it was recorded for and for fewer, at any position, in any buffers."""
    plain, recorder = model_of(family, tokenizer), CountingRecorder()
    sizes = (1, 3) if family == "llama" else (3,)
    steps = recorded(DecodeRunner, model_of(family, tokenizer, fused=True), recorder, *sizes)
    assert steps.refusal is None
    for positions in ([40], [70, 0], [50, 3, 20]):
        before = recorder.replayed
        compare_steps(steps, plain, positions)
        assert recorder.replayed == before + 1


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap"])
def test_a_probe_observes_the_same_in_a_recorded_pass(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of(family, tokenizer), CountingRecorder()
    passes = recorded(PrefillRunner, lm, recorder, 8)
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
def compiled(tokenizer: PreTrainedTokenizerFast) -> tuple[FusionEngine, CountingRecorder]:
    """An engine with recorded passes, and a recorder that counts the layers replayed."""
    engine, recorder = make_engine(model_of("llama", tokenizer), MemoryStore()), CountingRecorder()
    engine.warm(PASSAGES, bases=(FRAMED,))
    engine.runner.prefills = PrefillRunner(engine.lm, recorder)
    with pytest.MonkeyPatch.context() as patched:
        seams.recorder_has_kernels(patched, lambda *_: True)
        if DEVICE.type == "cpu":
            seams.large_blocks(patched)
        engine.runner.prefills.compile((16, 64))
    assert engine.runner.prefills.refusal is None
    return engine, recorder


@pytest.mark.parametrize("method", ["prophetkv", "epic", "qcfuse", "relaxkv", "full"])
def test_answers_are_the_same_with_recorded_passes(
    method: str, compiled: tuple[FusionEngine, CountingRecorder]
) -> None:
    """If either the probe or the pass cannot be recorded, the other is; for full prefill neither is."""
    engine, recorder = compiled
    prompt = engine.prompt(QUESTION, PASSAGES[:2])
    chosen = make_method(method) if method == "full" else make_method(method, ratio=0.2, base=FRAMED)
    expected, before = fuse_prompt(loading_first(engine.lm, engine.store), prompt, chosen), recorder.replayed
    result = engine.prefill(prompt, method=chosen)
    assert (recorder.replayed > before) == (method != "full")
    assert result.report.selected == expected.report.selected
    assert result.report.row_layers == expected.report.row_layers
    assert torch.allclose(result.logits, expected.logits, **CLOSE)


def test_an_exact_answer_is_healed_by_recorded_passes(compiled: tuple[FusionEngine, CountingRecorder]) -> None:
    engine, recorder = compiled
    prompt, params, before = engine.prompt(QUESTION, PASSAGES[:2]), SamplingParams(max_new_tokens=4), recorder.replayed
    exact = replace(params, fidelity="exact")
    result = engine.generate(prompt, exact, method=make_method("epic", ratio=0.2, base=FRAMED))
    assert recorder.replayed > before + 1, "the prefill, and passes that heal"
    assert result.ids == engine.generate(prompt, params, method=make_method("full")).ids


def test_each_layer_waits_for_its_stored_data(tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of("llama", tokenizer), CountingRecorder()
    passes = recorded(PrefillRunner, lm, recorder, 4)
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
    compiled: tuple[FusionEngine, CountingRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = compiled
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
    passes = recorded(PrefillRunner, lm, recorder, 4)
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


def test_what_fits_no_recording_is_launched(tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of("llama", tokenizer), CountingRecorder()
    passes, steps = recorded(PrefillRunner, lm, recorder, 4), recorded(DecodeRunner, lm, recorder, 1)
    before = recorder.replayed
    compare_passes(passes, lm, [1, 2, 3, 4, 8])  # more rows
    compare_passes(passes, lm, [0, 1, 2])  # every row
    compare_passes(passes, lm, [5, 8], visible=[on_device(0, 5, 8)] * lm.n_layers)
    compare_steps(steps, lm, [4, 5])
    assert recorder.replayed == before


def test_a_model_that_gives_its_layers_other_inputs_is_launched(tokenizer: PreTrainedTokenizerFast) -> None:
    lm, recorder = model_of("llama", tokenizer), CountingRecorder()
    passes = recorded(PrefillRunner, lm, recorder, 4)
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


def test_without_memory_for_many_rows_fewer_are_recorded(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    lm = model_of("llama", tokenizer)
    passes = PrefillRunner(lm, FullAt(8))
    with caplog.at_level(logging.WARNING):
        passes.compile((4, 8, 16))
    assert passes.refusal is None
    for size in (16, 8):
        assert f"{size}: recording failed: OutOfMemoryError: no room" in caplog.text
    compared = passes.replayed
    for rows, replayed in (([2, 8], 1), ([1, 2, 3, 4, 8], 0)):
        compare_passes(passes, lm, rows)
        assert passes.replayed == compared + replayed
        compared = passes.replayed


def test_without_memory_to_check_kernels_nothing_is_recorded(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise torch.OutOfMemoryError("no room")

    seams.recorder_has_kernels(monkeypatch, lambda *_: False)
    monkeypatch.setattr("qcfuse_rag.runtime.graphs.recorder.unavailable_reason", full)
    passes = PrefillRunner(model_of("llama", tokenizer), AgainAndAgain())
    passes.compile((4,))
    assert passes.refusal == "the kernels cannot be tried: the device is out of memory"


def test_recorded_passes_are_priced_once_they_are_timed(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = model_of("llama", tokenizer)
    passes = PrefillRunner(lm, AgainAndAgain())
    learned = LearnedCosts(lm, MemoryStore(), passes)
    passes.compile((16,))
    learned.observe_pass(100, 50, 1.0)
    assert learned().recorded_rows == 0
    learned.recorded_pass_s = 0.01
    assert (learned().recorded_rows, learned().recorded_pass_s) == (16, 0.01)


@every_runner
@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (Failing, "recording failed: RuntimeError: called"),
        (Breaking, "it ended half way"),
        (Remembering, "differs from the original by"),
        (Spoiling, "differs from the original by nan"),
    ],
)
def test_what_cannot_be_recorded_is_launched_and_the_reason_is_logged(
    kind: type[Runner],
    recorder: type[AgainAndAgain],
    reason: str,
    tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lm = model_of("llama", tokenizer)
    assert "compile" in str(kind(lm).refusal)
    with caplog.at_level(logging.WARNING):
        runner = recorded(kind, lm, recorder(), 2)
    assert reason in str(runner.refusal)
    assert reason in caplog.text
    if kind is DecodeRunner:
        compare_steps(runner, lm, [4])
    else:
        compare_passes(runner, lm, [2, 8])


def test_a_pass_with_one_layer_that_computes_nothing_is_not_recorded(tokenizer: PreTrainedTokenizerFast) -> None:
    passes = recorded(PrefillRunner, model_of("llama", tokenizer), Forgetful(), 4)
    assert "differs from the original by" in str(passes.refusal)


@every_runner
def test_without_kernels_nothing_is_recorded(
    kind: type[Runner], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.recorder_has_kernels(monkeypatch, lambda *_: False)
    recorder = CountingRecorder()
    assert "there are no kernels" in str(recorded(kind, model_of("llama", tokenizer), recorder, 2).refusal)
    assert recorder.recorded == 0


@every_runner
def test_what_does_not_write_its_keys_is_not_recorded(
    kind: type[Runner], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.KERNELS["append"](monkeypatch, lambda *_: None)
    runner = recorded(kind, model_of("llama", tokenizer), CountingRecorder(), 2)
    assert "differs from the original by nan" in str(runner.refusal)


def test_recorded_numbers_of_rows_leave_few_extra_rows() -> None:
    assert list(ROWS) == sorted(ROWS)
    for fewer, more in pairwise(ROWS):
        assert fewer < 128 or more * 3 <= (fewer + 1) * 4
        assert fewer < 512 or more * 6 <= (fewer + 1) * 7


def test_views_of_the_model_are_made_once(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, made = model_of("llama", tokenizer), []
    passes = PrefillRunner(lm, CountingRecorder())
    passes.compile((4,))

    def making(*args: Any) -> HookedLayer:
        made.append(args[1])
        return HookedLayer(*args)

    monkeypatch.setattr("qcfuse_rag.runtime.model_views.HookedLayer", making)
    buffer, _ = two_buffers(lm, 20)
    plan, ids = RowsPlan.of(on_device(3, 19), lm.sliding), on_device(5, 6)
    before = passes.replayed
    for _ in range(3):
        passes.logits(ids, plan, buffer)
        passes.hidden(ids, plan, buffer, depth=1)
    assert passes.replayed == before + 6
    assert made == [0]  # only for the first layer, by the first pass that ends after it


def test_answers_are_the_same_with_recorded_steps(tokenizer: PreTrainedTokenizerFast) -> None:
    engine, recorder = make_engine(model_of("llama", tokenizer), MemoryStore()), CountingRecorder()
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompts = [engine.prompt(question, PASSAGES) for question in (QUESTION, "Why?")]
    params, method = SamplingParams(max_new_tokens=4), make_method("qcfuse", ratio=0.3, base=FRAMED)
    expected = [engine.generate(prompt, params, method=method).ids for prompt in prompts]
    engine.runner.decodes = recorded(DecodeRunner, engine.lm, recorder, 2)
    before = recorder.replayed
    assert [engine.generate(prompt, params, method=method).ids for prompt in prompts] == expected
    with Scheduler(engine) as scheduler:
        answers = [scheduler.submit(prompt, params, method=method) for prompt in prompts]
        assert [answer.result(60).ids for answer in answers] == expected
    assert recorder.replayed > before


def test_threads_share_recorded_steps(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = model_of("llama", tokenizer)
    steps = recorded(DecodeRunner, lm, CountingRecorder(), 1)
    assert steps.refusal is None
    pairs = [two_buffers(lm, capacity) for capacity in (12, 20, 30)]
    expected = [forward_step(lm, [at], [5 + at], [launched]) for at, (launched, _) in enumerate(pairs)]
    right: list[bool] = []

    def ask(at: int) -> None:
        for _ in range(2):
            logits = steps([at], [5 + at], [pairs[at][1]])
            right.append(torch.allclose(logits, expected[at], rtol=1e-4, atol=1e-4))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, range(3)))
    assert right == [True] * 6
