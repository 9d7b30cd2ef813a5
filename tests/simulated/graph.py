"""Simulated CUDA graphs: a replay runs exactly the recorded launches again, over the same memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.simulated.memory import Memory
from tests.simulated.operations import Operation, tensors_in

if TYPE_CHECKING:
    from tests.simulated.device import Device


class Graph:
    """Replaces `torch.cuda.CUDAGraph`. Recording changes no memory: writes made to find shapes are undone."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: list[Callable[[int], None]] = []
        self._before: dict[int, tuple[Tensor, Tensor, object]] = {}
        self._owned: list[tuple[Memory, Tensor]] = []
        self._external: dict[int, Memory] = {}

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        if self._device.stream is self._device.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._device.graph = self

    def capture_end(self) -> None:
        self._device.graph = None
        for whole, content, _ in self._before.values():
            whole.copy_(content)
        self._before.clear()
        for _, tensor in self._owned:
            poison(tensor)

    def replay(self) -> None:
        device = self._device
        with device.lock:
            device.launched["graph"] += 1
            if any(memory.free for memory in self._external.values()):
                device.complain("a graph is replayed over memory that is free")
            epoch = device.stream.tick()
            for step in self._steps:
                step(epoch)
            for memory, tensor in self._owned:
                if memory.free:  # other graphs of the same pool use that memory, too
                    poison(tensor)

    # While it is recorded.

    def own(self, memory: Memory, tensor: Tensor) -> None:
        """Own memory that was allocated while recording, until the graph is freed."""
        self._owned.append((memory, tensor))
        weakref.finalize(self, self._device.memories.pop, memory.base, None).atexit = False

    def about_to(self, operation: Operation, written: Sequence[Tensor]) -> None:
        """Note the memory that an operation uses, and keep the content of the memory it writes."""
        for tensors, remember in ((tensors_in((operation.args, operation.kwargs)), self.note), (written, self.keep)):
            for memory in map(self._device.memory_of, tensors):
                if memory is not None:
                    remember(memory)

    def note(self, memory: Memory) -> None:
        """Note that memory is used; it must still exist when the graph is replayed."""
        if not self._owns(memory):
            self._external[memory.base] = memory

    def keep(self, memory: Memory) -> None:
        """Keep the content of some memory until recording is over."""
        if memory.base not in self._before and not self._owns(memory):
            whole = torch.from_numpy(memory.content())
            self._before[memory.base] = whole, whole.clone(), self._device.lease_of(memory)

    def _owns(self, memory: Memory) -> bool:
        return any(memory is owned for owned, _ in self._owned)

    def record(self, operation: Operation, results: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
        device = self._device
        new = {id(tensor) for tensor in fresh}
        written = [*operation.written(), *fresh]

        def step(epoch: int) -> None:
            what = f"{operation.name} of a graph"
            device.use_tensors(operation.reads(), epoch, write=False, what=what)
            for target, source in zip(results, tensors_in(operation.compute()), strict=True):
                if id(target) in new:
                    target.copy_(source)
            device.use_tensors(written, epoch, write=True, what=what)

        self._steps.append(step)

    def record_kernel(self, name: str, compute: Callable[[], None]) -> None:
        self._steps.append(lambda _: self._device.launch_kernel(name, compute))


def poison(tensor: Tensor) -> None:
    """Fill uninitialised memory with values that show up in results."""
    if tensor.numel():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
