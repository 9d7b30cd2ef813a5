"""What breaks a rule of the device is found, and what keeps it passes."""

from __future__ import annotations

import gc

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.simulated.device import Device

GPU = "cuda:0"


@pytest.fixture
def broken(device: Device) -> list[str]:
    """What was found, forgiven in the end."""
    found: list[str] = []
    device.broken = found
    yield found  # type: ignore[misc]
    device.broken = []


def test_numbers_are_those_of_the_cpu(device: Device) -> None:
    one = torch.arange(12.0).view(3, 4)
    there = one.to(GPU)
    assert there.device == torch.device(GPU)
    assert torch.equal((there @ there.T)[1:, ::2].cpu(), (one @ one.T)[1:, ::2])
    there[:, 1] = 7
    assert there.sum().item() == float(one.sum() - one[:, 1].sum() + 21)


def test_operands_on_two_devices_are_refused(device: Device) -> None:
    there = torch.ones(3, device=GPU)
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2], "a number may come from anywhere"
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.embedding(torch.tensor([0]), there[:, None])
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3)[torch.tensor([0], device=GPU)]
    with pytest.raises(RuntimeError, match="same device"):
        there[torch.tensor([0, 1], device=GPU)] = torch.ones(2)
    assert there[torch.tensor([0, 1])].tolist() == [1, 1], "indices may be the host's"


@pytest.mark.parametrize("waits", [False, True])
def test_what_another_stream_writes_has_to_be_waited_for(broken: list[str], waits: bool) -> None:
    there, other = torch.ones(8, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        there[:4].mul_(2)
    assert there[4:].sum() == 4, "other bytes of the same memory"
    if waits:
        torch.cuda.current_stream().wait_event(other.record_event())
    there[3:] + 1
    assert [one.split("\n")[0] for one in broken] == (
        [] if waits else ["aten::add on stream 1 reads what stream 2 is perhaps still writing"]
    )


@pytest.mark.parametrize("waits", [False, True])
def test_what_another_stream_reads_is_not_overwritten(broken: list[str], waits: bool) -> None:
    there, other = torch.ones(8, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        there * 2
    if waits:
        other.synchronize()
    there.zero_()
    assert len(broken) == (0 if waits else 1)


@pytest.mark.parametrize("waits", [False, True])
def test_page_locked_memory_is_left_alone_while_it_is_copied(broken: list[str], waits: bool) -> None:
    place = torch.empty(8, pin_memory=True)
    assert place.is_pinned()
    there = place.copy_(torch.ones(8)).to(GPU, non_blocking=True)
    if waits:
        there.sum().item()
    place.zero_()
    assert len(broken) == (0 if waits else 1)


@pytest.mark.parametrize("told", [False, True])
def test_memory_another_stream_uses_is_not_freed_unless_the_allocator_knows(broken: list[str], told: bool) -> None:
    there, other = torch.ones(8, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        kept = there + 1
    if told:
        there.record_stream(other)
    del there
    gc.collect()
    assert len(broken) == (0 if told else 1)
    torch.cuda.synchronize()
    del kept


@triton.jit
def shifted(given, into, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(into + at, tl.load(given + at + 1, mask=at < count, other=0.0), mask=at < SIZE)


def test_kernels_stay_within_their_operands(device: Device) -> None:
    given, into = torch.arange(8.0, device=GPU), torch.empty(8, device=GPU)
    shifted[(1,)](given, into, 7, SIZE=8)
    assert into.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    with pytest.raises(Exception, match="reads beyond an allocation of 32 bytes"):
        shifted[(1,)](given, into, 8, SIZE=8)
    with pytest.raises(Exception, match="not on the device"):
        shifted[(1,)](torch.arange(8.0), into, 7, SIZE=8)


def recorded(compute: object) -> tuple[Tensor, torch.cuda.CUDAGraph]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            result = compute()  # type: ignore[operator]
        finally:
            graph.capture_end()
    return result, graph


def test_a_graph_computes_when_it_is_replayed_and_over_the_same_memory(device: Device) -> None:
    given, total, factor = torch.ones(4, device=GPU), torch.zeros(4, device=GPU), [2.0]
    result, graph = recorded(lambda: total.add_(given * factor[0]) + 1)
    assert total.tolist() == [0] * 4, "recording changes nothing"
    assert result.isnan().all()
    factor[0] = 100.0
    graph.replay()
    given.fill_(5)
    graph.replay()
    assert result.tolist() == [13] * 4


def test_kernels_are_recorded_too(device: Device) -> None:
    given, into = torch.arange(8.0, device=GPU), torch.zeros(8, device=GPU)
    _, graph = recorded(lambda: shifted[(1,)](given, into, 7, SIZE=8))
    assert into.tolist() == [0] * 8
    given.mul_(2)
    graph.replay()
    assert into.tolist() == [2, 4, 6, 8, 10, 12, 14, 0]


def test_what_waits_is_not_recorded(device: Device) -> None:
    given = torch.ones(4, device=GPU)
    for compute in (given.nonzero, given.sum().item, lambda: given[given > 0], lambda: torch.ones(4).to(GPU)):
        with pytest.raises(RuntimeError, match="synchronizing"):
            recorded(compute)
    event, ones = torch.cuda.current_stream().record_event(), given > 0
    device.strict = True
    for wait in (given.tolist, event.synchronize, torch.cuda.synchronize, lambda: torch.where(ones)):
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait()
    given[ones] = 0.0
    device.strict = False


def test_the_host_waits_for_copies_unless_it_says_otherwise(device: Device) -> None:
    device.strict = True
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1 << 15).to(GPU, non_blocking=True)
    for told in (True, False):
        for place in (torch.ones(4), torch.empty(4, pin_memory=True)):
            if told:
                place.to(GPU, non_blocking=True)
                torch.zeros(4, device=GPU).copy_(place, non_blocking=True)
                continue
            with pytest.raises(RuntimeError, match="synchronizing"):
                place.to(GPU)
    device.strict = False


def test_memory_of_a_graph_is_not_to_be_freed(broken: list[str]) -> None:
    def doubling() -> tuple[Tensor, torch.cuda.CUDAGraph]:
        given = torch.ones(4, device=GPU)
        return recorded(lambda: given * 2)

    _, graph = doubling()
    gc.collect()
    graph.replay()
    assert broken[0].startswith("a graph is replayed over memory that is free")


def test_what_a_graph_leaves_behind_is_gone_when_another_is_recorded(device: Device) -> None:
    """Graphs of a pool share the memory that nothing refers to any more."""
    given, kept = torch.ones(4, device=GPU), []
    result, graph = recorded(lambda: (kept.append(given * 2), kept[0] + 1)[1])
    graph.replay()
    assert kept[0].tolist() == [2] * 4
    inner = kept[0].inner
    kept.clear()
    graph.replay()
    assert result.tolist() == [3] * 4
    assert inner.isnan().all()
