"""The simulation finds violations of the device's rules, and passes code that follows them."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.simulated.device import Device

GPU = "cuda:0"


@pytest.fixture
def broken(device: Device) -> list[str]:
    """The violations of this test, which may have some."""
    violations: list[str] = []
    device.broken = violations
    yield violations  # type: ignore[misc]
    device.broken = []


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


@pytest.mark.parametrize("waits", [False, True])
def test_reading_what_another_stream_writes_needs_a_wait(broken: list[str], waits: bool) -> None:
    on_gpu, other = torch.ones(8, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        on_gpu[:4].mul_(2)
    assert on_gpu[4:].sum() == 4, "other bytes of the same memory"
    if waits:
        torch.cuda.current_stream().wait_event(other.record_event())
    on_gpu[3:] + 1
    assert [violation.split("\n")[0] for violation in broken] == (
        [] if waits else ["aten::add on stream 1 reads what stream 2 is perhaps still writing"]
    )


@pytest.mark.parametrize("waits", [False, True])
def test_overwriting_what_another_stream_reads_needs_a_wait(broken: list[str], waits: bool) -> None:
    on_gpu, other = torch.ones(8, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        on_gpu * 2
    if waits:
        other.synchronize()
    on_gpu.zero_()
    assert len(broken) == (0 if waits else 1)


@pytest.mark.parametrize("waits", [False, True])
def test_page_locked_memory_is_not_written_while_it_is_copied(broken: list[str], waits: bool) -> None:
    pinned = torch.empty(8, pin_memory=True)
    assert pinned.is_pinned()
    on_gpu = pinned.copy_(torch.ones(8)).to(GPU, non_blocking=True)
    if waits:
        on_gpu.sum().item()
    pinned.zero_()
    assert len(broken) == (0 if waits else 1)


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_another_stream_uses_is_not_freed_unless_the_allocator_knows(broken: list[str], recorded: bool) -> None:
    on_gpu, other = torch.ones(8, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        kept = on_gpu + 1
    if recorded:
        on_gpu.record_stream(other)
    del on_gpu
    gc.collect()
    assert len(broken) == (0 if recorded else 1)
    torch.cuda.synchronize()
    del kept


def test_the_host_waits_for_blocking_copies_only(device: Device) -> None:
    device.strict = True
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1 << 15).to(GPU, non_blocking=True)
    for non_blocking in (True, False):
        for source in (torch.ones(4), torch.empty(4, pin_memory=True)):
            if non_blocking:
                source.to(GPU, non_blocking=True)
                torch.zeros(4, device=GPU).copy_(source, non_blocking=True)
                continue
            with pytest.raises(RuntimeError, match="synchronizing"):
                source.to(GPU)
    device.strict = False
