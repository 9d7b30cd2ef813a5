"""A host ahead of its device: how far, and what it knows of the time that passes there."""

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
from qcfuse_rag.store.prefill_base import FRAMED
from tests.simulated.device import Device
from tests.simulated.test_engine import PASSAGES, PROPHETKV, QUESTION, assert_same, engines
from tests.support import seams

TO_REPORT_WHICH_ROWS = "aten::_to_copy"


@pytest.mark.parametrize(
    ("method", "recorded", "missing"),
    [
        ("auto", False, []),
        ("prophetkv", True, []),
        ("prophetkv", False, ["Nobody stored this."]),
        ("qcfuse", False, []),
        ("reuse", False, []),
        ("full", False, []),
    ],
)
def test_the_host_waits_once_a_prefill_when_all_is_launched(
    method: str, recorded: bool, missing: list[str], device: Device, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Waiting between layers or stages, it could not launch ahead of the device."""
    assert kernels_available(torch.device("cuda", 0), torch.float32, 16)
    _, engine = engines(device, tokenizer, store=MemoryStore(pinned=True))
    if recorded:
        engine.runner.prefills.compile(rows=(48,))
    prompt = engine.prompt(QUESTION, [*PASSAGES, *missing])
    chosen = make_method("full") if method == "full" else replace(make_method(method, base=FRAMED), guard=None)
    device.launched.clear()
    device.host.waits.clear()
    engine.prefill(prompt, method=chosen)
    assert (device.launched["graph"] > 0) == recorded
    assert device.host.waits[threading.current_thread().name] == ["an event", TO_REPORT_WHICH_ROWS]


@pytest.mark.parametrize("method", ["reuse", "cacheblend"], ids=["layer by layer", "all layers at once"])
def test_of_what_is_placed_no_more_piles_up_on_the_device_than_may_be_there(
    method: str, device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = engines(device, tokenizer, store=MemoryStore(pinned=True), layers=6)
    prompt, chosen = here.prompt(QUESTION, PASSAGES), make_method(method, base=FRAMED)
    expected = here.prefill(prompt, method=chosen)
    room = 2 * expected.report.bytes_loaded // 6
    in_flight, most, send, release = 0, 0, HostToDevice.send, LayerLoader._release_placed
    turn, more_than_room = threading.Lock(), threading.Event()

    def counted(transfer: HostToDevice, tensors: Sequence[Tensor]) -> TransferHandle:
        nonlocal in_flight, most
        found = send(transfer, tensors)
        with turn:
            in_flight += found.nbytes
            most = max(most, in_flight)
        if most > room:
            more_than_room.set()
        return found

    def counted_release(loader: LayerLoader) -> None:
        nonlocal in_flight
        more_than_room.wait(timeout=10)  # so that there is something to keep within bounds
        before = list(loader._placing)
        with turn:
            release(loader)
            for nbytes, placed in before[: len(before) - len(loader._placing)]:
                assert all(map(device.host.clock.knows, placed.clock.values())), "given back before it was placed"
                in_flight -= nbytes

    seams.bytes_ahead(monkeypatch, room)
    monkeypatch.setattr(HostToDevice, "send", counted)
    monkeypatch.setattr(LayerLoader, "_release_placed", counted_release)
    assert_same(there.prefill(prompt, method=chosen), expected)
    assert room < most <= room + room // 2, "a layer more: it is sent before the thread waits"


def test_what_the_device_waits_for_is_neither_probing_nor_recomputing(
    device: Device, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = engines(device, tokenizer, store=MemoryStore(pinned=True))
    prompt, receive = engine.prompt(QUESTION, PASSAGES), TransferHandle.receive
    usual = engine.prefill(prompt, method=PROPHETKV).report.timings

    def late(sent: TransferHandle) -> None:
        device.host.seconds += 0.5
        receive(sent)

    monkeypatch.setattr(TransferHandle, "receive", late)
    found = engine.prefill(prompt, method=PROPHETKV).report.timings
    assert 0 < found.probe_s == pytest.approx(usual.probe_s, abs=0.1)
    assert 0 < found.recompute_s == pytest.approx(usual.recompute_s, abs=0.1)
