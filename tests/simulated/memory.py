"""An allocation of a simulated device, with the last uses of each of its bytes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.simulated.order import Clock, agent_of

Epochs = NDArray[np.int64]


class Lease:
    """Referenced by the tensors of an allocation; the memory is freed with the last of them."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


@dataclass(eq=False, slots=True)
class Memory:
    """An allocation.

    Attributes:
        base: address.
        nbytes: size in bytes.
        stream: the stream that owns it and may reuse it as soon as it is freed.
        pinned: whether it is page-locked memory of the host.
        written: by byte, the epoch of the last write.
        read: by agent and byte, the epoch of the last read.
        recorded_streams: streams announced to the allocator by `record_stream`.
    """

    base: int
    nbytes: int
    stream: int
    pinned: bool = False
    recorded_streams: set[int] = field(default_factory=set)
    read: dict[int, Epochs] = field(default_factory=dict)
    written: Epochs = field(init=False)

    def __post_init__(self) -> None:
        self.written = np.zeros(self.nbytes, np.int64)

    def note_read(self, where: object, epoch: int) -> None:
        marks = self.read.setdefault(agent_of(epoch), np.zeros(self.nbytes, np.int64))
        marks[where] = epoch  # type: ignore[index]

    def conflict(self, where: object, epoch: int, clock: Clock, *, write: bool) -> str | None:
        """Return the conflict of using some bytes now, given the clock of the user; None if there is none."""
        for other in _distinct(self.written[where]):  # type: ignore[index]
            if not _may_follow(epoch, other, clock):
                return f"{'overwrites' if write else 'reads'} what stream {agent_of(other)} is perhaps still writing"
        for agent, marks in self.read.items() if write else ():
            if not _may_follow(epoch, int(marks[where].max(initial=0)), clock):  # type: ignore[index]
                return f"overwrites what stream {agent} is perhaps still reading"
        return None

    def last_uses(self) -> Iterator[int]:
        """Yield epochs that include the last use by each agent."""
        yield from _distinct(self.written)
        for marks in self.read.values():
            yield int(marks.max(initial=0))


class Memories(dict[int, Memory]):
    """Allocations by their addresses, of which `bases` is the ascending list; any thread may add and free some."""

    def __init__(self) -> None:
        super().__init__()
        self.bases: list[int] = []

    def __setitem__(self, base: int, memory: Memory) -> None:
        if base not in self:
            insort(self.bases, base)
        super().__setitem__(base, memory)

    def pop(self, base: int, default: Memory | None = None) -> Memory | None:  # type: ignore[override]
        if base in self:
            self.bases.remove(base)
        return super().pop(base, default)


def _distinct(epochs: Epochs) -> list[int]:
    """Return the epochs that occur; of most memory all bytes have the same."""
    if epochs.size and (epochs == epochs.flat[0]).all():
        return [int(epochs.flat[0])]
    distinct: list[int] = np.unique(epochs).tolist()
    return distinct


def _may_follow(epoch: int, other: int, clock: Clock) -> bool:
    return other == 0 or agent_of(other) == agent_of(epoch) or clock.knows(other)


def bytes_of(tensor: Tensor) -> Epochs | slice:
    """Return the bytes of its allocation that a strided tensor occupies."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return slice(first, first + tensor.numel() * size)
    offsets = np.full((), first, np.int64)
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(length) * stride * size
    return (offsets[..., None] + np.arange(size)).reshape(-1)
