"""When kernels are used, and the reasons why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from qcfuse_rag.runtime.kernels import launch, support
from qcfuse_rag.runtime.kernels.support import unavailable_reason
from tests.runtime.kernels.operands import DTYPES
from tests.support.recorders import DEVICE


def test_kernels_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    half = (torch.float16, 64)
    assert unavailable_reason(torch.device("cpu"), *half) == "there are none for cpu"
    device = torch.device("cuda", 7)  # not in the cache
    monkeypatch.setenv("QCFUSE_KERNELS", "0")
    assert unavailable_reason(device, *half) == "switched off by QCFUSE_KERNELS=0"
    unavailable_reason.cache_clear()
    monkeypatch.setenv("QCFUSE_KERNELS", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert unavailable_reason(device, torch.float64, 64) == "there are none for torch.float64 and 64 channels a head"
    assert unavailable_reason(device, torch.float16, 576) == "there are none for torch.float16 and 576 channels a head"
    monkeypatch.setattr(support, "kernel_errors", lambda *_: {"attention": 1e-3, "place": float("nan")})
    assert unavailable_reason(device, *half) == "place is off by nan"
    unavailable_reason.cache_clear()

    def broken(*_: Any) -> dict[str, float]:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(support, "kernel_errors", broken)
    caplog.clear()
    for _ in range(2):
        assert unavailable_reason(device, *half) == "they do not run here (RuntimeError: no such instruction)"
    [logged] = caplog.records
    assert (logged.levelname, "no such instruction" in logged.getMessage()) == ("WARNING", True), "once"
    unavailable_reason.cache_clear()

    def full(*_: Any) -> dict[str, float]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(support, "kernel_errors", full)
    assert not support.kernels_available(device, *half)
    monkeypatch.setattr(support, "kernel_errors", lambda *_: {"attention": 1e-3})
    assert support.kernels_available(device, *half), "a lack of memory is not cached"
    unavailable_reason.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=DTYPES[2].marks)], ids=str)
def test_kernels_are_within_their_tolerance_here(dtype: torch.dtype) -> None:
    errors = support.kernel_errors(DEVICE, dtype, 64)
    assert len(errors) == 2 + 2 + 4 + 4
    assert max(errors.values()) < support.TOLERANCE


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [((9, 0), 12030, True), ((10, 0), 13000, True), ((9, 0), 12020, False), ((8, 9), 13000, False)],
)
def test_kernels_start_early_where_the_gpu_and_its_driver_can(
    capability: tuple[int, int], driver: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that cannot record such launches would cost all recordings."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    options = launch.dependent_launch.__wrapped__
    assert options(torch.device("cuda")) == {"DEPENDENT": False}, "the interpreter does not know them"
    monkeypatch.setattr(launch.triton, "JITFunction", object)
    assert options(torch.device("cuda")) == (
        {"DEPENDENT": True, "launch_pdl": True} if expected else {"DEPENDENT": False}
    )
    assert options(torch.device("cpu")) == {"DEPENDENT": False}
    monkeypatch.setattr(launch, "gdc_wait", None)
    assert options(torch.device("cuda")) == {"DEPENDENT": False}, "an older Triton"
