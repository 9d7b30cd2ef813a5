"""Copies from host memory to a CUDA device during a pass, through page-locked memory and on a separate stream.

A copy from ordinary memory blocks the host and cannot run at the same time as kernels. A copy from page-locked memory
can. Blocks that were read are copied through a page-locked ring, which is allocated once and is large enough to keep
the link busy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from qcfuse_rag.store.chunk import aligned_size

RING_BYTES = 64 << 20


class PinnedRing:
    """A ring of `[n]` uint8 memory; a range is handed out again after the copy that read it has ended."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._next = 0
        self._in_use: deque[tuple[int, int, torch.cuda.Event]] = deque()

    def copy(self, tensor: Tensor) -> Tensor | None:
        """Copy a tensor into the ring and return the copy, to be passed to `hold_until`; None if it does not fit."""
        size = aligned_size(tensor)
        if size > len(self._memory):
            return None
        if self._next + size > len(self._memory):
            # Wait for the previous lap's copies at the ring's end; otherwise they stay ahead of this lap's copies in
            # the queue.
            self._await_oldest(self._next, len(self._memory))
            self._next = 0
        start, self._next = self._next, self._next + size
        self._await_oldest(start, start + size)
        staged = self._memory[start : start + tensor.nbytes]
        copy_bytes(staged, tensor.contiguous().view(-1).view(torch.uint8))
        return staged.view(tensor.dtype).view(tensor.shape)

    def _await_oldest(self, start: int, stop: int) -> None:
        """Wait for the copies of a range. They are the oldest, since ranges are handed out in order."""
        while self._in_use and self._in_use[0][0] < stop and start < self._in_use[0][1]:
            self._in_use.popleft()[2].synchronize()

    def hold_until(self, staged: Tensor, done: torch.cuda.Event) -> None:
        """Keep a copy that `copy` returned until the device is done with it."""
        if not staged.nbytes:
            return  # an empty range overlaps no other, so waiting would stop at it
        start = staged.data_ptr() - self._memory.data_ptr()
        self._in_use.append((start, start + aligned_size(staged), done))


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy bytes in host memory, in this thread.

    Torch divides a copy among all threads, which wait longer for each other than the copy takes: .6 ms for 50 KB on 16
    processors of a virtual machine (2026-11-26).
    """
    np.copyto(target.numpy(), source.numpy())


class HostToDevice:
    """A model's link to its CUDA device: one ring and one stream. The threads that read blocks call it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = PinnedRing(torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True))
        # High priority: torch takes such streams from another pool than graph streams, so freeing graphs does not free
        # this stream's workspace.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def send(self, tensors: Sequence[Tensor]) -> TransferHandle:
        """Start copying tensors to the device; send many at once, since locking the link takes as long as a start."""
        computed = torch.cuda.current_stream(self.device).record_event()  # a chunk may be a sum computed here
        with self._lock, torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            copies = [self._start_copy(tensor) for tensor in tensors]
            nbytes = sum(new.nbytes for new, old in zip(copies, tensors, strict=True) if new is not old)
            return TransferHandle(self.device, copies, nbytes, self._stream.record_event(), computed)

    def send_spans(self, spans: Sequence[Tensor]) -> tuple[TransferHandle, list[int]]:
        """Start copying `[n]` uint8 spans of page-locked memory into one allocation; also return their addresses there.

        Their lengths are multiples of `store.chunk.SLAB_ALIGNMENT`.
        """
        stops = list(accumulate(map(len, spans)))
        computed = torch.cuda.current_stream(self.device).record_event()
        with self._lock, torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            memory = torch.empty(stops[-1], dtype=torch.uint8, device=self.device)
            # One call: between two, another thread may take Python's lock, for longer than the link takes for a span.
            torch._foreach_copy_(list(torch.split(memory, list(map(len, spans)))), list(spans), non_blocking=True)
            handle = TransferHandle(self.device, [memory], len(memory), self._stream.record_event(), computed)
        return handle, [memory.data_ptr() + start for start in (0, *stops[:-1])]

    def _start_copy(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device or tensor.is_pinned():
            return tensor.to(self.device, non_blocking=True)
        staged = self._ring.copy(tensor)
        if staged is None:
            return tensor.to(self.device)
        copy = staged.to(self.device, non_blocking=True)
        self._ring.hold_until(staged, self._stream.record_event())
        return copy


@dataclass(frozen=True, slots=True, eq=False)
class TransferHandle:
    """Tensors whose copies to a device have been started, not to be used before `receive`.

    Attributes:
        nbytes: bytes that were copied.
        copied: recorded on the device after the copies.
        computed: recorded on the device after the tensors that the reading thread computed there.
    """

    device: torch.device
    tensors: Sequence[Tensor]
    nbytes: int
    copied: torch.cuda.Event
    computed: torch.cuda.Event

    @property
    def is_complete(self) -> bool:
        """Whether all copies have ended."""
        return bool(self.copied.query())  # type: ignore[no-untyped-call]

    def receive(self) -> None:
        """Make the current stream wait for the tensors; the host does not wait."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self.copied)
        stream.wait_event(self.computed)
        for tensor in self.tensors:
            tensor.record_stream(stream)
