"""From host memory to a CUDA device beside a pass: through page-locked memory, on a stream of its own.

A copy from ordinary memory makes the host wait and cannot run beside kernels; one from page-locked memory can. What is
read goes through a ring of page-locked memory, which is as large as keeps a link busy and is made once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

RING_BYTES = 64 << 20
ALIGNMENT = 256
"""Bytes; any dtype can be viewed from there."""


class CopyEvent(Protocol):
    """Something a device will have done."""

    def synchronize(self) -> None:
        """Wait for it."""


class Ring:
    """Memory handed out in turn, and again when what was done with it before is done.

    Args:
        memory: `[n]` uint8.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._next = 0
        self._busy: deque[tuple[int, int, CopyEvent]] = deque()

    def copy(self, tensor: Tensor) -> Tensor | None:
        """Copy a tensor into the ring and return the copy, to be given to `used_by`; None if it is larger than that."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._memory):
            return None
        if self._next + size > len(self._memory):
            self._next = 0
        start, self._next = self._next, self._next + size
        while any(first < start + size and start < last for first, last, _ in self._busy):
            self._busy.popleft()[2].synchronize()
        place = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)

    def used_by(self, place: Tensor, done: CopyEvent) -> None:
        """Keep what `copy` returned as it is until something is done."""
        start = place.data_ptr() - self._memory.data_ptr()
        self._busy.append((start, start + -(-place.nbytes // ALIGNMENT) * ALIGNMENT, done))


class TransferLink:
    """An engine's way to its device: one ring, and one transfer at a time through it.

    Args:
        device: of CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ring = Ring(torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True))
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.turn = threading.Lock()


class HostToDevice:
    """What one request brings over a link.

    Used by the thread that reads.

    Args:
        link: of the engine.
    """

    def __init__(self, link: TransferLink) -> None:
        self._link, self.device = link, link.device

    def send(self, tensors: Sequence[Tensor]) -> TransferHandle:
        """Start tensors on their way to the device.

        Many at once: to take a turn and change streams takes the host as long as to start a copy.
        """
        link = self._link
        computed = torch.cuda.current_stream(self.device).record_event()  # a chunk may be the sum of several
        with link.turn, torch.cuda.device(self.device), torch.cuda.stream(link.stream):
            brought = [tensor if tensor.device == self.device else self._bring(tensor) for tensor in tensors]
            taken = sum(new.nbytes for new, old in zip(brought, tensors, strict=True) if new is not old)
            return TransferHandle(self.device, brought, taken, link.stream.record_event(), computed)

    def _bring(self, tensor: Tensor) -> Tensor:
        link = self._link
        if tensor.is_pinned():
            return tensor.to(self.device, non_blocking=True)
        place = link.ring.copy(tensor)
        if place is None:
            return tensor.to(self.device)
        brought = place.to(self.device, non_blocking=True)
        link.ring.used_by(place, link.stream.record_event())
        return brought


@dataclass(frozen=True, slots=True, eq=False)
class TransferHandle:
    """Tensors that are on their way to a device, or there.

    Attributes:
        device: where to.
        brought: the tensors, on the device; not to be used before `receive`.
        nbytes: what those take that were elsewhere.
        arrived: happens on the device when those that were elsewhere are there.
        computed: happens on the device when those that the reading thread computed are.
    """

    device: torch.device
    brought: Sequence[Tensor]
    nbytes: int
    arrived: torch.cuda.Event
    computed: torch.cuda.Event

    @property
    def here(self) -> bool:
        """Whether nothing of them is on its way over the link."""
        return bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def receive(self) -> None:
        """Have the device wait for them before it computes what is launched from now on; the host does not wait."""
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(self.arrived)
        computing.wait_event(self.computed)
        for tensor in self.brought:
            tensor.record_stream(computing)
