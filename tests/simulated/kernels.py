"""Run kernels of the simulated device in Triton's interpreter and check every address they touch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter

from tests.simulated.device import Device
from tests.simulated.memory import Epochs, Memory
from tests.simulated.tensor import DeviceTensor, inner_of


@contextmanager
def watched_kernels(device: Device) -> Iterator[None]:
    """Make kernels run on the simulated device."""
    run, builder = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        if any(
            isinstance(value, Tensor) and not isinstance(value, DeviceTensor) for value in (*args, *kwargs.values())
        ):
            raise ValueError(f"{self.fn.__name__} was given a tensor that is not on the device")
        operands = [inner_of(value) for value in args]
        options = {name: inner_of(value) for name, value in kwargs.items()}
        device.launch_kernel(self.fn.__name__, lambda: run(self, *operands, **options))

    def loaded(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        _touch(device, pointers, mask, write=False)
        return load(self, pointers, mask, *args)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        _touch(device, pointers, mask, write=True)
        return store(self, pointers, value, mask, *args)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", launched))
        stack.enter_context(mock.patch.object(builder, "create_masked_load", loaded))
        stack.enter_context(mock.patch.object(builder, "create_masked_store", stored))
        yield


def _touch(device: Device, pointers: Any, mask: Any, *, write: bool) -> None:
    """Note the memory that a kernel reads or writes, and check that it is allocated."""
    if device.kernel is None:
        return
    name, epoch = device.kernel
    size = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
    addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].reshape(-1)
    for memory, offsets in _by_memory(device, np.unique(addresses.astype(np.int64))):
        if memory is None or offsets[-1] + size > memory.nbytes:
            beyond = "unallocated memory" if memory is None else f"beyond an allocation of {memory.nbytes} bytes"
            raise IndexError(f"{name} {'writes' if write else 'reads'} {beyond}")
        device.use(memory, _bytes(offsets, size), epoch, write=write, what=name)


def _bytes(offsets: NDArray[np.int64], size: int) -> Epochs | slice:
    """Return the bytes of elements of so many bytes at ascending offsets."""
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first == (len(offsets) - 1) * size:  # one beside the other
        return slice(first, last + size)
    return (offsets[:, None] + np.arange(size)).reshape(-1)


def _by_memory(device: Device, addresses: NDArray[np.int64]) -> Iterator[tuple[Memory | None, NDArray[np.int64]]]:
    """Yield allocations with the offsets of ascending addresses inside them."""
    bases = tuple(device.memories.bases)
    while len(addresses):
        index = bisect_right(bases, int(addresses[0]))
        memory = device.memories.get(bases[index - 1]) if index else None
        inside = len(addresses) if index == len(bases) else int(addresses.searchsorted(bases[index]))
        yield memory, addresses[:inside] - (0 if memory is None else memory.base)
        addresses = addresses[inside:]
