"""Kernels on the simulated device: Triton's interpreter runs them, and every address they touch is looked at."""

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
from tests.simulated.memory import Memory
from tests.simulated.tensor import DeviceTensor, inner_of


@contextmanager
def watched_kernels(device: Device) -> Iterator[None]:
    """Have kernels run on the device."""
    run, builder = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(one, Tensor) and not isinstance(one, DeviceTensor) for one in (*args, *kwargs.values())):
            raise ValueError(f"{self.fn.__name__} was given a tensor that is not on the device")
        operands, options = [inner_of(one) for one in args], {name: inner_of(one) for name, one in kwargs.items()}
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
    """Note what a kernel reads or writes, if it is anybody's memory at all."""
    if device.kernel is None:
        return
    name, epoch = device.kernel
    size = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
    addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].reshape(-1)
    for memory, at in _by_memory(device, addresses.astype(np.int64)):
        if memory is None or at.max() + size > memory.nbytes:
            beyond = "nobody's memory" if memory is None else f"beyond an allocation of {memory.nbytes} bytes"
            raise IndexError(f"{name} {'writes' if write else 'reads'} {beyond}")
        if device.graph is not None:
            device.graph.note(memory)
            if write:
                device.graph.keep(memory)
        device.use(memory, (at[:, None] + np.arange(size)).reshape(-1), epoch, write=write, what=name)


def _by_memory(device: Device, addresses: NDArray[np.int64]) -> Iterator[tuple[Memory | None, NDArray[np.int64]]]:
    """Yield allocations, and where in them addresses are."""
    bases = sorted(device.memories)  # memory is freed whenever a tensor goes, in whatever thread
    while len(addresses):
        place = bisect_right(bases, int(addresses.min()))
        memory = device.memories.get(bases[place - 1]) if place else None
        end = np.inf if place == len(bases) else bases[place]
        mine = addresses < end
        yield memory, addresses[mine] - (0 if memory is None else memory.base)
        addresses = addresses[~mine]
