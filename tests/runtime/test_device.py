"""Copies to devices, and waiting for them: only CUDA's run ahead of the host."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch

from qcfuse_rag import LanguageModel, QCFuseError
from qcfuse_rag.bundled import default_model
from qcfuse_rag.runtime import device as devices


def test_only_copies_to_cuda_devices_run_ahead() -> None:
    """torch does not keep a freed source for Apple's GPUs."""
    assert [devices.copies_ahead(torch.device(kind)) for kind in ("cpu", "mps", "cuda")] == [False, False, True]


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_the_host_waits_for_the_device_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {name: mock.Mock() for name in ("cuda", "mps")}
    for name, wait in waits.items():
        monkeypatch.setattr(getattr(torch, name), "synchronize", wait)
    devices.finish(torch.device(kind))
    assert [name for name, wait in waits.items() if wait.called] == ([] if kind == "cpu" else [kind])


def test_copies_are_whole_when_they_return() -> None:
    target = devices.to_device(torch.arange(3), torch.device("cpu"))
    devices.copy_into(target, torch.tensor([4, 5, 6]))
    assert target.tolist() == [4, 5, 6]


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is an Apple GPU")
def test_an_apple_gpu_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(QCFuseError, match="no device 'mps' here: this torch or machine has no Apple GPU"):
        LanguageModel.load(default_model(), device="mps")


def test_threads_that_ask_at_once_share_one_link(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made, waiting = list[torch.device](), threading.Barrier(4)

    def make(device: torch.device) -> object:
        made.append(device)
        time.sleep(0.05)
        return object()

    def ask(lm: LanguageModel) -> object:
        waiting.wait()
        return lm.transfer()

    lm, other = replace(llama), replace(llama)
    assert lm.transfer() is None
    monkeypatch.setattr("qcfuse_rag.runtime.language_model.kernels_available", lambda *_: True)
    monkeypatch.setattr("qcfuse_rag.runtime.loading.host_to_device.HostToDevice", make)
    with ThreadPoolExecutor(4) as threads:
        links = list(threads.map(ask, [lm] * 4))
    assert (len({*map(id, links)}), made) == (1, [lm.device])
    assert other.transfer() is not links[0]
