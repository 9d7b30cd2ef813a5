"""The host runs ahead of the device: how often it waits, how far ahead it may be, and how it times the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import MemoryStore, make_method
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.loading.host_to_device import HostToDevice, TransferHandle
from qcfuse_rag.runtime.loading.layer_loader import LayerLoader
from qcfuse_rag.store.key import FRAMED
from tests.simulated.device import Device
from tests.simulated.test_engine import PASSAGES, QUESTION, assert_same, engines

COPY_OF_ROWS = "aten::_to_copy"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "missing"),
    [("auto", []), ("prophetkv", ["Nobody stored this."]), ("qcfuse", []), ("reuse", []), ("full", [])],
)
def test_the_host_waits_once_a_prefill_when_all_is_launched(
    method: str, missing: list[str], device: Device, tokenizer: PreTrainedTokenizerFast
) -> None:
    """If it waited between layers or stages, it could not launch ahead of the device."""
    assert kernels_available(torch.device("cuda", 0), torch.float32, 16)
    _, engine = engines(device, tokenizer, store=MemoryStore(pinned=True))
    prompt = engine.prompt(QUESTION, [*PASSAGES, *missing])
    chosen = make_method("full") if method == "full" else replace(make_method(method, base=FRAMED), guard=None)
    device.launched.clear()
    device.host.waits.clear()
    engine.prefill(prompt, method=chosen)
    assert device.host.waits[threading.current_thread().name] == ["an event", COPY_OF_ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["reuse", "cacheblend"], ids=["layer by layer", "all layers at once"])
def test_transferred_data_on_the_device_stays_within_its_limit(
    method: str, device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, gpu = engines(device, tokenizer, store=MemoryStore(pinned=True), layers=6)
    prompt, chosen = cpu.prompt(QUESTION, PASSAGES), make_method(method, base=FRAMED)
    expected = cpu.prefill(prompt, method=chosen)
    limit = 2 * expected.report.bytes_loaded // 6
    in_flight, most, send, release = 0, 0, HostToDevice.send_spans, LayerLoader._release_placed
    lock, more_than_limit = threading.Lock(), threading.Event()

    def counted(transfer: HostToDevice, spans: Sequence[Tensor]) -> tuple[TransferHandle, list[int]]:
        nonlocal in_flight, most
        handle, addresses = send(transfer, spans)
        with lock:
            in_flight += handle.nbytes
            most = max(most, in_flight)
        if most > limit:
            more_than_limit.set()
        return handle, addresses

    def counted_release(loader: LayerLoader) -> None:
        nonlocal in_flight
        more_than_limit.wait(timeout=10)  # so that the limit is reached
        before = list(loader._placing)
        with lock:
            release(loader)
            for nbytes, placed in before[: len(before) - len(loader._placing)]:
                assert all(map(device.host.clock.knows, placed.clock.values())), "released before it was placed"
                in_flight -= nbytes

    monkeypatch.setattr("qcfuse_rag.runtime.loading.layer_loader.AHEAD_BYTES", limit)
    monkeypatch.setattr(HostToDevice, "send_spans", counted)
    monkeypatch.setattr(LayerLoader, "_release_placed", counted_release)
    assert_same(gpu.prefill(prompt, method=chosen), expected)
    assert limit < most <= limit + limit // 2, "one layer more: it is sent before the thread waits"
