"""The engine's streams, transfers, kernels and recorded passes follow the rules of a CUDA device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import (
    FusionEngine,
    LanguageModel,
    MemoryStore,
    SamplingParams,
    Scheduler,
    SchedulerSettings,
    make_method,
)
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.simulated.cuda import moved
from tests.simulated.device import Device
from tests.support.engines import make_engine
from tests.support.families import build_model

PASSAGES = ["The ferry is green.", "Orla keeps the paint."]
QUESTION = "Who paints?"
PROPHETKV = make_method("prophetkv", ratio=0.3, base=FRAMED)
REUSE = make_method("reuse", base=FRAMED)
TIERS = {"memory": {}, "pinned": {"pinned": True}, "device": {"device": "cuda:0"}}


def engine_on(
    device: Device | None,
    tokenizer: PreTrainedTokenizerFast,
    family: str = "llama",
    store: MemoryStore | None = None,
    layers: int = 2,
) -> FusionEngine:
    """Return an engine over a tiny model, on the device or on the CPU, with the same weights."""
    model = build_model(family, num_hidden_layers=layers)
    lm = LanguageModel.wrap(model if device is None else moved(model, device), tokenizer)
    return make_engine(lm, MemoryStore() if store is None else store)


def engines(device: Device, tokenizer: PreTrainedTokenizerFast, *args: Any, **kwargs: Any) -> list[FusionEngine]:
    """Return an engine on the CPU and one on the device, with the same entries in their stores."""
    gpu = engine_on(device, tokenizer, *args, **kwargs)
    kwargs["store"] = MemoryStore(kv_dtype=gpu.store.kv_dtype)
    cpu = engine_on(None, tokenizer, *args, **kwargs)
    cpu.warm(PASSAGES, bases=(BLIND, FRAMED))
    for entry in cpu.store.entries():
        opened = cpu.store.open(entry.address)
        assert not isinstance(opened, Miss)
        gpu.store.put(*opened)
    return [cpu, gpu]


def assert_same(result: Prefilled, expected: Prefilled) -> None:
    assert result.report.selected == expected.report.selected
    assert result.report.fallback == expected.report.fallback
    assert float((result.logits.cpu() - expected.logits).abs().max()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "kv_dtype", "layers"),
    [("memory", "model", 2), ("pinned", "model", 4), ("device", "model", 4), ("pinned", "int8", 2)],
)
def test_stored_chunks_arrive_from_every_tier(
    tier: str, kv_dtype: str, layers: int, device: Device, tokenizer: PreTrainedTokenizerFast
) -> None:
    cpu, gpu = engines(device, tokenizer, store=MemoryStore(kv_dtype=kv_dtype, **TIERS[tier]), layers=layers)
    prompt = cpu.prompt(QUESTION, PASSAGES)
    for _ in range(2):  # the second prefill reuses the memory of the first
        assert_same(gpu.prefill(prompt, method=REUSE), cpu.prefill(prompt, method=REUSE))
        gc.collect()
    assert device.launched["place"] > 0


@pytest.mark.slow
def test_requests_share_the_device(device: Device, tokenizer: PreTrainedTokenizerFast) -> None:
    """Prefills run between decode steps of other requests in the scheduler's thread."""
    cpu, gpu = engines(device, tokenizer, store=MemoryStore(pinned=True))
    greedy = SamplingParams(max_new_tokens=4)
    prompts = [cpu.prompt(QUESTION, passages) for passages in (PASSAGES, PASSAGES[::-1], PASSAGES[:1])]
    with Scheduler(gpu, SchedulerSettings(active=2, waiting=4)) as scheduler:
        answers = [scheduler.submit(prompt, greedy, method=PROPHETKV) for prompt in prompts]
        result = [answer.result(timeout=120).ids for answer in answers]
    assert result == [cpu.generate(prompt, greedy, method=PROPHETKV).ids for prompt in prompts]
