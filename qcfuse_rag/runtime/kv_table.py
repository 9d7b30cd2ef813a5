"""A table of the addresses of several requests' keys and values, which kernels read."""

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
    """Addresses of the keys and values of several requests.

    Attributes:
        entries: `[layers, B, 4]` int64 on the device: the pointers to keys and to values, and the strides between
            their heads.
        shapes: of each layer's keys and values.
        dtype: of keys and values.
        longest: most keys that a request may have; it decides into how many parts a kernel splits the keys.
        aligned: whether every token's keys and values begin at a multiple of 16 bytes.
    """

    entries: Tensor
    shapes: Sequence[KVShape]
    dtype: torch.dtype
    longest: int
    aligned: bool

    @classmethod
    def of(cls, buffers: Sequence[KVBuffer], shapes: Sequence[KVShape], longest: int) -> KVTable:
        """Build the table of one buffer for each request, of at most `longest` keys.

        Raises:
            ValueError: if a buffer does not have the layout of `KVBuffer.allocate`.
        """
        entries, sample = buffer_addresses(buffers), buffers[0].keys[0]
        aligned = is_aligned(entries, shapes, sample.dtype)
        return cls(entries.to(sample.device, non_blocking=True), shapes, sample.dtype, longest, aligned)


class RebindableKVTable:
    """A table that CUDA graphs read, and that can be bound to other requests before each replay.

    If fewer requests are bound than the table has entries, the remaining entries point at `dummy_buffer`.

    Args:
        dummy_buffer: a buffer whose content is not used, in the layout of `KVBuffer.allocate`.
        shapes: of each layer's keys and values.
        requests: number of requests that the table has entries for.
        longest: most keys that a request may have.

    Attributes:
        table: the table.
    """

    def __init__(self, dummy_buffer: KVBuffer, shapes: Sequence[KVShape], requests: int, longest: int) -> None:
        self._dummy_buffer = dummy_buffer
        self.table = KVTable.of([dummy_buffer] * requests, shapes, longest)
        self._bound = self.table.entries.to("cpu", copy=True)
        self._addresses: WeakKeyDictionary[KVBuffer, Tensor] = WeakKeyDictionary()

    def bind(self, buffers: Sequence[KVBuffer]) -> bool:
        """Point the table at some buffers; return False if their layout or alignment is not the recorded one."""
        n_unused = self.table.entries.shape[1] - len(buffers)
        padded = (*buffers, *[self._dummy_buffer] * n_unused)
        try:
            addresses = torch.stack([self._addresses_of(buffer) for buffer in padded], dim=1)
        except ValueError:
            return False
        if torch.equal(addresses, self._bound):
            return True
        if is_aligned(addresses, self.table.shapes, self.table.dtype) != self.table.aligned:
            return False
        self.table.entries.copy_(addresses, non_blocking=True)
        self._bound = addresses
        return True

    def _addresses_of(self, buffer: KVBuffer) -> Tensor:
        if buffer not in self._addresses:
            self._addresses[buffer] = buffer_addresses([buffer])[:, 0]
        return self._addresses[buffer]


def buffer_addresses(buffers: Sequence[KVBuffer]) -> Tensor:
    """Return the `[layers, B, 4]` entries of a table, on the host.

    Raises:
        ValueError: if a buffer does not have the layout of `KVBuffer.allocate`.
    """
    for buffer in buffers:
        for tensor in (*buffer.keys, *buffer.values):
            if len(tensor) != 1 or not tensor.is_contiguous():
                raise ValueError(f"a buffer must be contiguous and of one request, got {tuple(tensor.shape)}")
    layers = zip(*(zip(buffer.keys, buffer.values, strict=True) for buffer in buffers), strict=True)
    entries = [
        [(key.data_ptr(), value.data_ptr(), key.stride(1), value.stride(1)) for key, value in layer] for layer in layers
    ]
    return torch.tensor(entries, dtype=torch.int64)


def is_aligned(addresses: Tensor, shapes: Sequence[KVShape], dtype: torch.dtype) -> bool:
    """Return whether every token of buffers at `[layers, B, 4]` addresses begins at a multiple of 16 bytes."""
    dims = {shape.key_dim for shape in shapes} | {shape.value_dim for shape in shapes}
    return not bool((addresses[..., :2] % 16).any()) and all(dim * dtype.itemsize % 16 == 0 for dim in dims)
