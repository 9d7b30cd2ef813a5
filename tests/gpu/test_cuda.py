"""On a CUDA device: the same numbers as on the CPU, in float32 and in the dtypes GPUs are used with."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import BLIND, FRAMED, FusionEngine, LanguageModel, MemoryStore, SamplingParams, make_method
from qcfuse_rag.fuse.prefill import prefill
from qcfuse_rag.fuse.self_check import check_exact
from tests.conftest import PASSAGES, QUESTION
from tests.families import FAMILIES, build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def engine_on(device: str, dtype: torch.dtype, family: str, tokenizer: PreTrainedTokenizerFast) -> FusionEngine:
    engine = FusionEngine(LanguageModel.wrap(build_model(family).to(device, dtype), tokenizer), MemoryStore())
    engine.warm(PASSAGES, bases=(BLIND, FRAMED))
    return engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_engine_reproduces_the_model(family: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerFast) -> None:
    check_exact(LanguageModel.wrap(build_model(family).to("cuda", dtype), tokenizer))


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


@pytest.mark.parametrize("numbers", ["model", "int8"])
@pytest.mark.parametrize("pinned", [False, True])
def test_loading_beside_a_pass_gives_what_loading_first_gives(
    numbers: str, pinned: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = LanguageModel.wrap(build_model("llama").to("cuda", torch.float16), tokenizer)
    store = MemoryStore(pinned=pinned)
    store.numbers = numbers
    engine = FusionEngine(lm, store)
    engine.warm(PASSAGES, bases=(FRAMED,))
    prompt, method = engine.prompt(QUESTION, PASSAGES), make_method("prophetkv", ratio=0.3, base=FRAMED)
    first = prefill(lm, store, prompt, method)
    for _ in range(20):  # a transfer that is not waited for shows now and then
        during = engine.prefill(prompt, method=method)
        assert torch.equal(first.logits, during.logits)
        assert first.report.selected == during.report.selected
