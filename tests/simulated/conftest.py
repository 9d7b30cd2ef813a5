"""A simulated device for each test; the test fails if a rule of the device is broken."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from tests.simulated.device import Device
from tests.support import seams

# Where there is a CUDA device, tests/gpu uses that.
collect_ignore_glob = ["test_*.py"] if torch.cuda.is_available() or find_spec("triton") is None else []


@pytest.fixture(scope="session")
def cached_reason() -> Callable[..., str | None]:
    """`unavailable_reason` with a cache that only these tests use."""
    from qcfuse_rag.runtime.kernels.support import unavailable_reason

    return cache(unavailable_reason.__wrapped__)


@pytest.fixture(scope="session")
def garbage_frozen() -> Iterator[None]:
    """Leave what libraries have made out of garbage collections, of which there are several a test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def device(
    monkeypatch: pytest.MonkeyPatch, cached_reason: Callable[..., str | None], garbage_frozen: None
) -> Iterator[Device]:
    from qcfuse_rag.runtime.kernels.launch import concurrent_programs, holds_large_tile
    from qcfuse_rag.runtime.kernels.sparse_attention import supports_large_tile
    from tests.simulated.cuda import simulated_cuda

    monkeypatch.setattr("qcfuse_rag.runtime.kernels.support.unavailable_reason", cached_reason)
    monkeypatch.setattr("qcfuse_rag.runtime.kernels.support.TOKENS", 40)  # the interpreter is slow
    monkeypatch.setattr("qcfuse_rag.runtime.kernels.support.ROWS", 8)
    seams.large_blocks(monkeypatch)
    monkeypatch.setattr("qcfuse_rag.runtime.language_model.fused_view", lambda model: model)  # without fused views
    seams.ring_bytes(monkeypatch, 1 << 13)  # small, so that the ring wraps around
    with simulated_cuda() as device:
        yield device
        gc.collect()
        assert not device.broken, "\n".join(device.broken[:3])
    for cached in (concurrent_programs, holds_large_tile, supports_large_tile):
        cached.cache_clear()
