"""A simulated device for each test, on which no rule may be broken."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from tests.simulated.device import Device

# Where there is a CUDA device, tests/gpu uses that.
collect_ignore_glob = ["test_*.py"] if torch.cuda.is_available() or find_spec("triton") is None else []


@pytest.fixture(scope="session")
def remembered() -> Callable[..., str | None]:
    """Why kernels are refused, remembered by these tests alone."""
    from qcfuse_rag.runtime.kernels.support import unavailable_reason

    return cache(unavailable_reason.__wrapped__)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, remembered: Callable[..., str | None]) -> Iterator[Device]:
    from qcfuse_rag.runtime.kernels.launch import is_hopper, processors
    from qcfuse_rag.runtime.kernels.sparse_attention import takes_tall
    from tests.simulated.cuda import simulated_cuda

    for name, value in {"kernel_refusal": remembered, "TOKENS": 40, "ROWS": 8}.items():  # the interpreter is slow
        monkeypatch.setattr(f"qcfuse_rag.runtime.kernels.support.{name}", value)
    monkeypatch.setattr(
        "qcfuse_rag.runtime.graphs.prefill_graphs.leanest_first", lambda model: [model]
    )  # as it is for these kernels
    monkeypatch.setattr("qcfuse_rag.runtime.graphs.decode_graphs.leanest_steps", lambda model: {"model": model})
    monkeypatch.setattr("qcfuse_rag.runtime.loading.host_to_device.RING_BYTES", 1 << 13)  # so that it goes round
    with simulated_cuda() as device:
        yield device
        gc.collect()
        assert not device.broken, "\n".join(device.broken[:3])
    for remembering in (processors, is_hopper, takes_tall):
        remembering.cache_clear()
