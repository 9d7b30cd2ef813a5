"""Whoever loads an engine on a CUDA device gets it compiled: from Python, and through LlamaIndex and LangChain."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore
from qcfuse_rag.engine.first_passes import run_first_passes
from qcfuse_rag.models.rope import KVShape, LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.cost import Costs, LoadTimes
from qcfuse_rag.runtime.graphs.recorder import GraphRecorder
from qcfuse_rag.runtime.loading.host_to_device import HostToDevice, TransferLink
from qcfuse_rag.runtime.loading.layer_loader import LayerLoader
from qcfuse_rag.runtime.loading.sources import LoadingChunk
from qcfuse_rag.runtime.loading.wait_budget import WaitBudget
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.factory import open_store
from qcfuse_rag.store.prefill_base import FRAMED
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.simulated.cuda import moved
from tests.simulated.device import Device
from tests.support import seams
from tests.support.engines import make_engine
from tests.support.families import build_model
from tests.support.passages import PASSAGES


def from_python(**settings: Any) -> FusionEngine:
    return FusionEngine.load("M", check=False, verdict="ignore", **settings)


def from_langchain(**settings: Any) -> FusionEngine:
    return pytest.importorskip("langchain_qcfuse").ChatQCFuse(model="M", **settings).engine  # type: ignore[no-any-return]


def from_llama_index(**settings: Any) -> FusionEngine:
    package = pytest.importorskip("llama_index.llms.qcfuse")
    return package.QCFuseLLM(model="M", **settings).engine  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::qcfuse_rag.errors.UnverifiedMethod")
@pytest.mark.parametrize("load", [from_python, from_langchain, from_llama_index])
def test_an_engine_is_compiled_before_its_first_request(
    load: Callable[..., FusionEngine],
    device: Device,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models, compiled = [build_model("llama"), moved(build_model("llama"), device)], list[str]()
    monkeypatch.setattr(LanguageModel, "load", lambda *_, **__: LanguageModel.wrap(models.pop(), tokenizer))
    monkeypatch.setattr(FusionEngine, "compile", lambda engine: compiled.append(engine.lm.device.type))
    monkeypatch.setattr("qcfuse_rag.engine.opening.check_exact_once", lambda lm: None)
    load().close()
    load().close()
    assert compiled == ["cuda"], "not on a CPU"
    models = [build_model("llama"), moved(build_model("llama"), device)]
    load(compiled=False).close()
    load(compiled=True).close()
    assert compiled == ["cuda", "cpu"]


def test_the_first_passes_make_the_link_and_compile_for_the_stores_format(
    device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page-locked memory, its stream, and the kernel for a format of stored numbers wait for no question."""
    from qcfuse_rag.runtime.kernels import placement  # needs Triton

    links, formats = list[object](), set[object]()
    make_link, place = TransferLink.__init__, placement.launch_table

    def linked(link: TransferLink, *args: Any) -> None:
        links.append(link)
        make_link(link, *args)

    def placed(entries: Any, form: Any, *rest: Any) -> None:
        formats.add(form.dtype)
        place(entries, form, *rest)

    monkeypatch.setattr(TransferLink, "__init__", linked)
    monkeypatch.setattr(placement, "launch_table", placed)
    monkeypatch.setattr("qcfuse_rag.engine.first_passes._prompt_shapes", lambda lm: [(2, 8, 0.1)])
    engine = make_engine(
        LanguageModel.wrap(moved(build_model("llama"), device), tokenizer), MemoryStore(numbers="int8")
    )
    formats.clear()  # of the comparison of kernels with their references
    run_first_passes(engine.runner, engine.prompts)
    assert len(links) == 1
    assert [str(dtype) for dtype in formats] == ["torch.int8"]
    engine.runner.transfers.open()
    assert len(links) == 1, "a request uses the link that is there"


def test_loading_is_timed_by_the_path_that_requests_take(
    device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the link and by the placement kernel: copies that the host waits for would take ten times as long."""

    def copied(*_: Any, **__: Any) -> None:
        raise AssertionError("no request on a GPU copies so")

    monkeypatch.setattr("qcfuse_rag.runtime.loading.sources.copy_layer", copied)
    lm = LanguageModel.wrap(moved(build_model("llama", num_hidden_layers=2), device), tokenizer)
    engine = make_engine(lm, MemoryStore(numbers="int8"))
    engine.warm(PASSAGES, bases=(FRAMED,))
    monkeypatch.setattr("qcfuse_rag.runtime.placement.copy_layer", copied)
    launched = device.launched["place"]
    costs = engine.runner.costs()
    assert costs.load_s > 0
    assert costs.overlaps
    assert device.launched["place"] > launched


def test_compiling_times_a_fused_prefill_with_recorded_passes(
    device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's work before and between passes, which is most of a short prompt's time on a GPU."""
    from qcfuse_rag.engine import first_passes

    monkeypatch.setattr(first_passes, "MANY", 3)  # the interpreter is slow
    monkeypatch.setattr(first_passes, "TOKENS", 8)
    seams.measured_passes(monkeypatch, lambda *_: Costs(pass_s=1e-9, row_s=1e-12))
    seams.measured_loading(monkeypatch, lambda *_: LoadTimes(1e-3, 1e-3))
    engine = make_engine(
        LanguageModel.wrap(moved(build_model("llama", num_hidden_layers=1), device), tokenizer), MemoryStore()
    )
    assert first_passes.measure_recorded_pass(engine.runner, engine.prompts) is None, "before passes are recorded"
    engine.runner.prefills.compile(rows=(48,))
    engine.runner.costs.recorded_pass_s = first_passes.measure_recorded_pass(engine.runner, engine.prompts)
    assert engine.runner.costs.recorded_pass_s > 1e-4, "lookups take the host some time"
    assert engine.runner.costs().recorded_pass_s == engine.runner.costs.recorded_pass_s
    assert engine.runner.with_store(MemoryStore()).costs.recorded_pass_s == engine.runner.costs.recorded_pass_s


def test_recorders_do_not_share_a_stream(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch hands out 32 in turn; freeing the graphs of one would free what those of the other multiply in."""
    streams = itertools.cycle([device.new_stream(), device.new_stream()])
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: next(streams))
    first, second = GraphRecorder(torch.device("cuda", 0)), GraphRecorder(torch.device("cuda", 0))
    used = {recorder._stream.cuda_stream for recorder in (first, second)}
    assert len(used) == 2
    with pytest.raises(RuntimeError, match="streams of cuda:0 are used by recorded graphs"):
        GraphRecorder(torch.device("cuda", 0))
    del second
    third = GraphRecorder(torch.device("cuda", 0))
    assert {recorder._stream.cuda_stream for recorder in (first, third)} == used


@pytest.mark.parametrize("numbers", ["model", "int8"])
def test_page_locked_chunks_are_sent_by_few_copies(
    numbers: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One allocation for each chunk, and one copy for each chunk and each of four groups of its layers."""
    pinned, pin = list[Tensor](), device.pin
    monkeypatch.setattr(device, "pin", lambda tensor: pinned.append(tensor) or pin(tensor))
    n_chunks, n_layers, n_tokens, shape = 5, 36, 2, KVShape(1, 16, 16)
    store, generator = MemoryStore(pinned=True, numbers=numbers), torch.Generator().manual_seed(0)
    for number in range(n_chunks):
        tensors = [torch.randn(1, n_tokens, 16, generator=generator) for _ in range(2 * n_layers)]
        ranking = torch.arange(n_tokens).expand(n_layers, -1)
        chunk = ChunkKV.of(tensors[::2], tensors[1::2], ranking, probe_layers=(17,))
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

    expected, link = loaded(torch.device("cpu"), None), HostToDevice(TransferLink(gpu))
    copies, launches = device.launched["aten::copy_"], device.launched["place"]
    found = loaded(gpu, link)
    assert device.launched["aten::copy_"] - copies == 4 * n_chunks
    assert device.launched["place"] - launches <= 4 * (1 if numbers == "model" else 2)
    for side, own in ((found.keys, expected.keys), (found.values, expected.values)):
        assert all(torch.allclose(layer.cpu(), same, atol=1e-6) for layer, same in zip(side, own, strict=True))


def test_chunks_on_the_device_are_placed_without_a_thread(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to wait for, and a thread would take Python's lock."""
    gpu, shape, n_layers, store = torch.device("cuda", 0), KVShape(1, 16, 16), 36, MemoryStore(device="cuda:0")
    tensors = [torch.randn(1, 2, 16) for _ in range(2 * n_layers)]
    ranking = torch.arange(2).expand(n_layers, -1)
    store.put(example_key(), ChunkKV.of(tensors[::2], tensors[1::2], ranking, probe_layers=(17,)))
    chunk = store.get(example_key())
    assert isinstance(chunk, ChunkKV)
    buffer = KVBuffer.allocate([shape] * n_layers, 2, dtype=torch.float32, device=gpu)
    transfer, ropes = HostToDevice(TransferLink(gpu)), [LayerRope(torch.zeros(8))] * n_layers
    monkeypatch.setattr(threading, "Thread", None)
    copies = device.launched["aten::copy_"]
    loader = LayerLoader(buffer, ropes, [LoadingChunk(0, chunk)], transfer=transfer, wait_budget=WaitBudget(None))
    loader.wait(0)
    loader.wait()
    assert device.launched["aten::copy_"] == copies
    for side, own in ((buffer.keys, tensors[::2]), (buffer.values, tensors[1::2])):
        assert all(torch.allclose(layer[0].cpu(), same) for layer, same in zip(side, own, strict=True))


def test_memory_tiers_of_an_engine_on_a_gpu_are_page_locked(
    device: Device, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """From the folder that users name, too; a store that was told not to stays as it is."""
    lm = LanguageModel.wrap(moved(build_model("llama"), device), tokenizer)
    for store, locked in ((open_store(tmp_path), True), (MemoryStore(), True), (MemoryStore(pinned=False), False)):
        engine = make_engine(lm, store)
        engine.warm(PASSAGES[:1], bases=(FRAMED,))
        [key] = engine.corpus.keys(engine.prompts.chunk_ids(PASSAGES[0]), (FRAMED,))
        chunk = store.get(key)
        assert isinstance(chunk, ChunkKV)
        assert chunk.blocks["key.0"].is_pinned() == locked
        store.close()


def test_entries_that_cannot_be_page_locked_are_kept_all_the_same(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(tensor: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device, "pin", refused)
    store = MemoryStore(pinned=True)
    store.put(example_key(), example_chunk())
    assert isinstance(store.get(example_key()), ChunkKV)
    assert "kept in ordinary memory" in caplog.text
