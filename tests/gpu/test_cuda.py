"""On a CUDA device: the same numbers as on the CPU, in float32 and in the dtypes GPUs are used with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, SamplingParams, make_method
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.runtime.forward import forward_step
from qcfuse_rag.runtime.graphs.recorder import GraphRecorder
from qcfuse_rag.store.key import BLIND, FRAMED
from qcfuse_rag.verification.exactness import check_exact
from tests.support.engines import loading_first, make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES, QUESTION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WITH_EXPERTS = ("gpt-oss-sinks", "qwen2-moe-silent-window")
"""Whose code may wait for the device, by transformers' way to compute experts there."""


def engine_on(device: str, dtype: torch.dtype, family: str, tokenizer: PreTrainedTokenizerFast) -> FusionEngine:
    engine = make_engine(LanguageModel.wrap(build_model(family).to(device, dtype), tokenizer), MemoryStore())
    engine.warm(PASSAGES, bases=(BLIND, FRAMED))
    return engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_engine_reproduces_the_model(
    family_name: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast
) -> None:
    check_exact(LanguageModel.wrap(build_model(family_name).to("cuda", dtype), tokenizer))


@pytest.mark.parametrize("method", ["full", "reuse", "random", "epic", "prophetkv", "qcfuse"])
@pytest.mark.parametrize("family", ["llama", "gemma3-two-ropes", "gpt-oss-sinks"])
def test_logits_are_those_of_the_cpu(family: str, method: str, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu, on_gpu = (engine_on(device, torch.float32, family, tokenizer) for device in ("cpu", "cuda"))
    prompt = on_cpu.prompt(QUESTION, PASSAGES)
    expected = on_cpu.prefill(prompt, method=make_method(method))
    found = on_gpu.prefill(prompt, method=make_method(method))
    assert found.report.selected == expected.report.selected
    assert float((found.logits.cpu() - expected.logits).abs().max()) < 1e-3


def test_decoding_on_the_device(tokenizer: PreTrainedTokenizerFast) -> None:
    on_cpu, on_gpu = (engine_on(device, torch.float32, "llama", tokenizer) for device in ("cpu", "cuda"))
    params = SamplingParams(max_new_tokens=16)
    prompt = on_cpu.prompt(QUESTION, PASSAGES)
    assert on_gpu.generate(prompt, params).ids == on_cpu.generate(prompt, params).ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decode_steps_are_recorded_for_every_family(
    family_name: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = engine_on("cuda", dtype, family_name, tokenizer)
    stream = engine.stream(engine.prompt(QUESTION, PASSAGES), SamplingParams(max_new_tokens=1))
    position, buffer = stream.report.prompt_tokens, stream.prefilled.buffer
    engine.runner.decodes.compile((1, 2))
    if family_name not in WITH_EXPERTS:
        assert engine.runner.decodes.refusal is None
    found, expected = (
        engine.runner.decodes([5], [position], [buffer]),
        forward_step(engine.lm, [5], [position], [buffer]),
    )
    off = {torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]  # parts of keys are added up in another order
    assert float((found - expected).norm() / expected.norm()) < off


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_passes_are_recorded_for_every_family(
    family_name: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = engine_on("cuda", dtype, family_name, tokenizer)
    prompt = engine.prompt(QUESTION, PASSAGES)
    methods = [make_method("prophetkv", ratio=0.3, base=FRAMED), make_method("reuse", base=FRAMED)]
    expected = [engine.prefill(prompt, method=method) for method in methods]
    engine.runner.prefills.compile((16, 128))
    if family_name not in WITH_EXPERTS:
        assert engine.runner.prefills.refusal is None
    for _ in range(5):  # what is not waited for shows now and then
        for method, launched in zip(methods, expected, strict=True):
            before = engine.runner.prefills.replayed
            found = engine.prefill(prompt, method=method)
            assert engine.runner.prefills.replayed > before or engine.runner.prefills.refusal is not None
            if found.report.selected == launched.report.selected:  # near ties may go either way in half precision
                assert float((found.logits - launched.logits).norm() / launched.logits.norm()) < 5e-2


def test_what_waits_for_the_device_is_not_recorded_and_does_no_harm() -> None:
    recorder, current = GraphRecorder(torch.device("cuda")), torch.cuda.current_stream()
    held = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"):
        recorder.record(lambda: held * held.sum().item())
    assert torch.cuda.current_stream() == current
    torch.cuda.empty_cache()
    result, replay = recorder.record(lambda: held * 2)
    held.fill_(3)
    with recorder.exclusive():
        replay()
    assert result.tolist() == [6] * 4


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
@pytest.mark.parametrize("held", [{}, {"pinned": True}, {"device": "cuda"}], ids=["memory", "pinned", "device"])
def test_loading_beside_a_pass_gives_what_loading_first_gives(
    kv_dtype: str, held: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = LanguageModel.wrap(build_model("llama").to("cuda", torch.float16), tokenizer)
    store = MemoryStore(**held)
    store.kv_dtype = kv_dtype
    engine = make_engine(lm, store)
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt, method = engine.prompt(QUESTION, PASSAGES), make_method("prophetkv", ratio=0.3, base=FRAMED)
    first = fuse_prompt(loading_first(lm, store), prompt, method)
    for _ in range(20):  # a transfer that is not waited for shows now and then
        during = engine.prefill(prompt, method=method)
        assert torch.equal(first.logits, during.logits)
        assert first.report.selected == during.report.selected
