"""Where the keys and values of some requests are, as kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.runtime.buffer import KVBuffer


@dataclass(frozen=True, slots=True, eq=False)
class KVTable:
    """Where the keys and values of some requests are.

    Attributes:
        entries: `[layers, B, 4]` int64 on the device: pointers to keys and values, and how far apart their heads are.
        shapes: of each layer's keys and values.
        dtype: of keys and values.
        longest: keys that the longest request may have, by which the number of parts is chosen that each one's keys are
            split into.
        aligned: whether all that entries point to is aligned to 16 bytes.
    """

    entries: Tensor
    shapes: Sequence[KVShape]
    dtype: torch.dtype
    longest: int
    aligned: bool

    @classmethod
    def of(cls, buffers: Sequence[KVBuffer], shapes: Sequence[KVShape], longest: int) -> KVTable:
        """Write the table of some buffers.

        Args:
            buffers: of the requests.
            shapes: of each layer's keys and values.
            longest: keys that the longest request may have.

        Raises:
            ValueError: if a buffer is not laid out as `KVBuffer.allocate` does.
        """
        entries, some = buffer_addresses(buffers), buffers[0].keys[0]
        aligned = is_aligned(entries, shapes, some.dtype)
        return cls(entries.to(some.device, non_blocking=True), shapes, some.dtype, longest, aligned)


class RebindableKVTable:
    """A table that CUDA graphs read, pointed at the buffers of those they serve next.

    Where there are fewer of these than it has places for, the places left over point at a buffer that nobody reads.

    Args:
        unread: that buffer, laid out as `KVBuffer.allocate` does.
        shapes: of each layer's keys and values.
        requests: places.
        longest: keys that a request may have.

    Attributes:
        table: the table.
    """

    def __init__(self, unread: KVBuffer, shapes: Sequence[KVShape], requests: int, longest: int) -> None:
        self._unread = unread
        self.table = KVTable.of([unread] * requests, shapes, longest)
        self._places = self.table.entries.to("cpu", copy=True)
        self._known: WeakKeyDictionary[KVBuffer, Tensor] = WeakKeyDictionary()

    def point_at(self, buffers: Sequence[KVBuffer]) -> bool:
        """Point at some buffers; return False if they are not laid out as what reads the table expects."""
        empty = self.table.entries.shape[1] - len(buffers)
        try:
            places = torch.stack([self._places_of(buffer) for buffer in (*buffers, *[self._unread] * empty)], dim=1)
        except ValueError:
            return False
        if torch.equal(places, self._places):
            return True
        if is_aligned(places, self.table.shapes, self.table.dtype) != self.table.aligned:
            return False
        self.table.entries.copy_(places, non_blocking=True)
        self._places = places
        return True

    def _places_of(self, buffer: KVBuffer) -> Tensor:
        """Return where a buffer's layers are; looked up once for an answer."""
        if buffer not in self._known:
            self._known[buffer] = buffer_addresses([buffer])[:, 0]
        return self._known[buffer]


def buffer_addresses(buffers: Sequence[KVBuffer]) -> Tensor:
    """Return the entries of a table, on the host.

    Raises:
        ValueError: if a buffer is not laid out as `KVBuffer.allocate` does.
    """
    for buffer in buffers:
        for held in (*buffer.keys, *buffer.values):
            if len(held) != 1 or not held.is_contiguous():
                raise ValueError(f"a buffer must be contiguous and of one request, got {tuple(held.shape)}")
    layers = zip(*(zip(buffer.keys, buffer.values, strict=True) for buffer in buffers), strict=True)
    rows = [
        [(key.data_ptr(), value.data_ptr(), key.stride(1), value.stride(1)) for key, value in layer] for layer in layers
    ]
    return torch.tensor(rows, dtype=torch.int64)


def is_aligned(places: Tensor, shapes: Sequence[KVShape], dtype: torch.dtype) -> bool:
    """Return whether all tokens of buffers at `[layers, B, 4]` places begin at multiples of 16 bytes."""
    apart = {shape.key_dim for shape in shapes} | {shape.value_dim for shape in shapes}
    return not bool((places[..., :2] % 16).any()) and all(dim * dtype.itemsize % 16 == 0 for dim in apart)
