"""The simulation finds violations of the device's rules, and passes code that follows them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from tests.simulated.device import Device

GPU = "cuda:0"


def test_numbers_are_those_of_the_cpu(device: Device) -> None:
    on_cpu = torch.arange(12.0).view(3, 4)
    on_gpu = on_cpu.to(GPU)
    assert on_gpu.device == torch.device(GPU)
    assert torch.equal((on_gpu @ on_gpu.T)[1:, ::2].cpu(), (on_cpu @ on_cpu.T)[1:, ::2])
    on_gpu[:, 1] = 7
    assert on_gpu.sum().item() == float(on_cpu.sum() - on_cpu[:, 1].sum() + 21)


def test_operands_on_two_devices_are_refused(device: Device) -> None:
    on_gpu = torch.ones(3, device=GPU)
    assert (on_gpu + torch.tensor(1.0)).tolist() == [2, 2, 2], "a scalar may come from either"
    with pytest.raises(RuntimeError, match="same device"):
        on_gpu + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.embedding(torch.tensor([0]), on_gpu[:, None])
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3)[torch.tensor([0], device=GPU)]
    with pytest.raises(RuntimeError, match="same device"):
        on_gpu[torch.tensor([0, 1], device=GPU)] = torch.ones(2)
    assert on_gpu[torch.tensor([0, 1])].tolist() == [1, 1], "indices may be on the host"


def read_elsewhere(waits: bool) -> object:
    on_gpu, other = torch.ones(8, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        on_gpu[:4].mul_(2)
    assert on_gpu[4:].sum() == 4, "other bytes of the same memory"
    if waits:
        torch.cuda.current_stream().wait_event(other.record_event())
    return on_gpu[3:] + 1


def overwrite_elsewhere(waits: bool) -> object:
    on_gpu, other = torch.ones(8, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        on_gpu * 2
    if waits:
        other.synchronize()
    return on_gpu.zero_()


def overwrite_page_locked(waits: bool) -> object:
    pinned = torch.empty(8, pin_memory=True)
    assert pinned.is_pinned()
    on_gpu = pinned.copy_(torch.ones(8)).to(GPU, non_blocking=True)
    if waits:
        on_gpu.sum().item()
    return pinned.zero_()


def free_elsewhere(recorded: bool) -> object:
    on_gpu, other = torch.ones(8, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        kept = on_gpu + 1
    if recorded:
        on_gpu.record_stream(other)
    del on_gpu
    gc.collect()
    return kept


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(
    ("use", "violation"),
    [
        (read_elsewhere, "aten::add on stream 1 reads what stream 2 is perhaps still writing"),
        (overwrite_elsewhere, "overwrites what stream 2 is perhaps still reading"),
        (overwrite_page_locked, "by the host overwrites what stream 1 is perhaps still reading"),
        (free_elsewhere, "memory of stream 1 is freed while stream 2 is perhaps at it"),
    ],
)
def test_memory_is_used_after_what_another_stream_does_with_it(
    use: Callable[[bool], object], violation: str, follows: bool, device: Device
) -> None:
    used = use(follows)
    found, device.broken[:] = [broken.split("\n")[0] for broken in device.broken], []
    assert [violation in broken for broken in found[:1]] == ([] if follows else [True])
    torch.cuda.synchronize()
    del used


@pytest.mark.parametrize("pinned", [False, True])
def test_the_host_waits_for_blocking_copies_only(pinned: bool, device: Device) -> None:
    source = torch.empty(4, pin_memory=pinned)
    source.to(GPU, non_blocking=True)
    torch.zeros(4, device=GPU).copy_(source, non_blocking=True)
    assert not device.host.waits
    source.to(GPU)
    assert len(device.host.waits) == 1
