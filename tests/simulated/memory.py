"""An allocation of a simulated device, and who has used which of its bytes last."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.simulated.order import Clock, agent_of

Epochs = NDArray[np.int64]


class Lease:
    """Held by the tensors in an allocation; when the last of them goes, the memory is free."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


@dataclass(eq=False, slots=True)
class Memory:
    """An allocation.

    Attributes:
        base, nbytes: where.
        stream: of whom; what is freed there is handed out there again at once.
        pinned: of the host.
        written: by byte, the epoch that wrote it last.
        read: by agent, by byte, the epoch that read it last.
        recorded_streams: streams that the allocator was told of by `record_stream`.
        graph: whether a graph has it for itself.
        free: whether no tensor lies in it any more.
    """

    base: int
    nbytes: int
    stream: int
    pinned: bool = False
    graph: bool = False
    free: bool = False
    recorded_streams: set[int] = field(default_factory=set)
    read: dict[int, Epochs] = field(default_factory=dict)
    written: Epochs = field(init=False)

    def __post_init__(self) -> None:
        self.written = np.zeros(self.nbytes, np.int64)

    def content(self) -> NDArray[np.uint8]:
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.base))

    def note_read(self, where: object, epoch: int) -> None:
        marks = self.read.setdefault(agent_of(epoch), np.zeros(self.nbytes, np.int64))
        marks[where] = epoch  # type: ignore[index]

    def conflict(self, where: object, epoch: int, clock: Clock, *, write: bool) -> str | None:
        """Return what is wrong with using some bytes now, for one who knows what a clock does; None if nothing is."""
        for other in np.unique(self.written[where]).tolist():  # type: ignore[index]
            if not _may_follow(epoch, other, clock):
                return f"{'overwrites' if write else 'reads'} what stream {agent_of(other)} is perhaps still writing"
        for agent, marks in self.read.items() if write else ():
            if not _may_follow(epoch, int(marks[where].max(initial=0)), clock):  # type: ignore[index]
                return f"overwrites what stream {agent} is perhaps still reading"
        return None

    def last_uses(self) -> Iterator[int]:
        """Yield epochs, the last of each agent that wrote or read any of it among them."""
        yield from np.unique(self.written).tolist()
        for marks in self.read.values():
            yield int(marks.max(initial=0))


def _may_follow(epoch: int, other: int, clock: Clock) -> bool:
    return other == 0 or agent_of(other) == agent_of(epoch) or clock.knows(other)


def bytes_of(tensor: Tensor) -> Epochs | slice:
    """Return which bytes of its allocation a strided tensor lies in."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return slice(first, first + tensor.numel() * size)
    at = np.full((), first, np.int64)
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + np.arange(length) * stride * size
    return (at[..., None] + np.arange(size)).reshape(-1)
