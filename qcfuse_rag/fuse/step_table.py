"""Where the keys and values of a decode step's requests are, as kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.model.rope import KVShape


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """Where the keys and values of a step's requests are.

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
    def of(cls, buffers: Sequence[KVBuffer], shapes: Sequence[KVShape], longest: int) -> StepTable:
        """Write the table of some buffers.

        Args:
            buffers: of the requests.
            shapes: of each layer's keys and values.
            longest: keys that the longest request may have.

        Raises:
            ValueError: if a buffer is not laid out as `KVBuffer.allocate` does.
        """
        entries, some = list_places(buffers), buffers[0].keys[0]
        aligned = is_aligned(entries, shapes, some.dtype)
        return cls(entries.to(some.device), shapes, some.dtype, longest, aligned)


def list_places(buffers: Sequence[KVBuffer]) -> Tensor:
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
