"""A simulated device for each test, on which no rule may be broken."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.simulated.device import Device

# Where there is a CUDA device, tests/gpu uses that.
collect_ignore_glob = ["test_*.py"] if torch.cuda.is_available() or find_spec("triton") is None else []


@pytest.fixture(scope="session")
def no_device_remembered() -> Iterator[None]:
    """Forget afterwards what is known of devices: there is none."""
    from qcfuse_rag.fuse.kernels import launch, support

    yield
    support.kernel_refusal.cache_clear()
    launch.processors.cache_clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, no_device_remembered: None) -> Iterator[Device]:
    from tests.simulated.cuda import simulated_cuda

    monkeypatch.setattr("qcfuse_rag.fuse.kernels.support.TOKENS", 40)  # the interpreter is slow
    monkeypatch.setattr("qcfuse_rag.fuse.kernels.support.ROWS", 8)
    monkeypatch.setattr("qcfuse_rag.fuse.transfer.RING_BYTES", 1 << 13)  # so that it goes round
    with simulated_cuda() as device:
        yield device
        assert not device.broken, "\n".join(device.broken[:3])
