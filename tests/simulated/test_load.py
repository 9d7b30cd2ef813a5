"""Whoever loads an engine on a CUDA device gets it compiled: from Python, and through LlamaIndex and LangChain."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore
from qcfuse_rag.engine import first_passes
from qcfuse_rag.models.rope import KVShape, LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.loading.host_to_device import HostToDevice
from qcfuse_rag.runtime.loading.layer_loader import LayerLoader, WaitBudget
from qcfuse_rag.runtime.loading.sources import LoadingChunk
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.store.key import FRAMED
from qcfuse_rag.store.testing import example_key
from tests.simulated.cuda import moved
from tests.simulated.device import Device
from tests.support.engines import make_engine, make_warmed_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::qcfuse_rag.errors.UnverifiedMethod")
def test_an_engine_is_compiled_before_its_first_request(
    device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, compiled = [build_model("llama"), moved(build_model("llama"), device)], list[str]()
    monkeypatch.setattr(LanguageModel, "load", lambda *_, **__: LanguageModel.wrap(models.pop(), tokenizer))
    monkeypatch.setattr(FusionEngine, "compile", lambda engine: compiled.append(engine.lm.device.type))
    monkeypatch.setattr("qcfuse_rag.engine.engine.check_exact_once", lambda lm: None)

    def load(**settings: Any) -> FusionEngine:
        return FusionEngine.load("M", check=False, verdict="ignore", **settings)

    load().close()
    load().close()
    assert compiled == ["cuda"], "not on a CPU"
    models = [build_model("llama"), moved(build_model("llama"), device)]
    load(compiled=False).close()
    load(compiled=True).close()
    assert compiled == ["cuda", "cpu"]


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_page_locked_chunks_are_sent_by_few_copies(
    kv_dtype: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One allocation for each chunk, and one copy for each chunk and each of four groups of its layers."""
    pinned, pin = list[Tensor](), device.pin
    monkeypatch.setattr(device, "pin", lambda tensor: pinned.append(tensor) or pin(tensor))
    n_chunks, n_layers, n_tokens, shape = 5, 36, 2, KVShape(1, 16, 16)
    store, generator = MemoryStore(pinned=True, kv_dtype=kv_dtype), torch.Generator().manual_seed(0)
    for number in range(n_chunks):
        tensors = [torch.randn(1, n_tokens, 16, generator=generator) for _ in range(2 * n_layers)]
        ranking = torch.arange(n_tokens).expand(n_layers, -1)
        chunk = ChunkKV.of(tensors[::2], tensors[1::2], ranking)
        store.put(example_key(number), chunk)
    assert len(pinned) == n_chunks
    chunks = [chunk for number in range(n_chunks) if isinstance(chunk := store.get(example_key(number)), ChunkKV)]
    gpu = torch.device("cuda", 0)

    def loaded(device: torch.device, transfer: HostToDevice | None) -> KVBuffer:
        buffer = KVBuffer.allocate([shape] * n_layers, n_chunks * n_tokens, dtype=torch.float32, device=device)
        ropes = [LayerRope(torch.ones(8))] * n_layers
        loading = [LoadingChunk(number * n_tokens, chunk) for number, chunk in enumerate(chunks)]
        LayerLoader(buffer, ropes, loading, transfer=transfer, wait_budget=WaitBudget(None)).wait()
        return buffer

    expected, link = loaded(torch.device("cpu"), None), HostToDevice(gpu)
    copies, launches = device.launched["aten::copy_"], device.launched["place"]
    found = loaded(gpu, link)
    assert device.launched["aten::copy_"] - copies == 4 * n_chunks
    assert device.launched["place"] - launches <= 4 * (1 if kv_dtype == "model" else 2)
    for side, own in ((found.keys, expected.keys), (found.values, expected.values)):
        assert all(torch.allclose(layer.cpu(), same, atol=1e-6) for layer, same in zip(side, own, strict=True))


def test_chunks_on_the_device_are_placed_without_a_thread(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to wait for, and a thread would take Python's lock."""
    gpu, shape, n_layers, store = torch.device("cuda", 0), KVShape(1, 16, 16), 36, MemoryStore(device="cuda:0")
    tensors = [torch.randn(1, 2, 16) for _ in range(2 * n_layers)]
    ranking = torch.arange(2).expand(n_layers, -1)
    store.put(example_key(), ChunkKV.of(tensors[::2], tensors[1::2], ranking))
    chunk = store.get(example_key())
    assert isinstance(chunk, ChunkKV)
    buffer = KVBuffer.allocate([shape] * n_layers, 2, dtype=torch.float32, device=gpu)
    transfer, ropes = HostToDevice(gpu), [LayerRope(torch.zeros(8))] * n_layers
    monkeypatch.setattr(threading, "Thread", None)
    copies = device.launched["aten::copy_"]
    loader = LayerLoader(buffer, ropes, [LoadingChunk(0, chunk)], transfer=transfer, wait_budget=WaitBudget(None))
    loader.wait(0)
    loader.wait()
    assert device.launched["aten::copy_"] == copies
    for side, own in ((buffer.keys, tensors[::2]), (buffer.values, tensors[1::2])):
        assert all(torch.allclose(layer[0].cpu(), same) for layer, same in zip(side, own, strict=True))


@pytest.mark.slow
def test_memory_tiers_of_an_engine_on_a_gpu_are_page_locked(
    device: Device, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """From the folder that users name, too; a store that was told not to stays as it is."""
    lm = LanguageModel.wrap(moved(build_model("llama"), device), tokenizer)
    for store, locked in ((open_store(tmp_path), True), (MemoryStore(), True), (MemoryStore(pinned=False), False)):
        engine = make_warmed_engine(lm, store, texts=PASSAGES[:1], bases=(FRAMED,))
        [key] = engine.corpus.keys(engine.prompts.chunk_ids(PASSAGES[0]), (FRAMED,))
        chunk = store.get(key)
        assert isinstance(chunk, ChunkKV)
        assert chunk.blocks["key.0"].is_pinned() == locked
        store.close()


@pytest.mark.slow
def test_a_recorded_pass_is_timed_over_page_locked_memory(
    device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As requests find their passages: a thousand copies through the ring would be most of the time."""
    monkeypatch.setattr(first_passes, "MANY_PASSAGES", 2)
    monkeypatch.setattr(first_passes, "TOKENS", 16)  # the interpreter is slow
    monkeypatch.setattr(HostToDevice, "send", None)
    engine = make_engine(LanguageModel.wrap(moved(build_model("llama"), device), tokenizer), MemoryStore())
    engine.runner.prefills.refusal = None
    device.launched.clear()  # the kernels were compared with their references
    assert first_passes.recorded_pass_s(engine.runner, engine.prompts)
    assert device.launched["place"] > 0
