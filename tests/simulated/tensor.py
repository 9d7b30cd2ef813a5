"""Tensors that say they are on a CUDA device, and send all that is done with them to the simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated.memory import Lease, Memory

if TYPE_CHECKING:
    from tests.simulated.device import Device

GPU = torch.device("cuda", 0)


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device.

    Attributes:
        inner: its numbers, on the CPU.
        memory: where they lie.
    """

    inner: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory, lease: Lease, simulation: Device) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
        )
        made.inner, made.memory, made.lease, made.simulation = inner, memory, lease, simulation
        return made

    def __repr__(self) -> str:
        return f"on the device: {self.inner}"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def is_contiguous(self, **given: Any) -> bool:
        return self.inner.is_contiguous(**given)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded_streams.add(stream.number)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        flat = [one for part in given for one in (part if isinstance(part, (list, tuple)) else [part])]
        simulation = next(one.simulation for one in flat if isinstance(one, DeviceTensor))
        return simulation.run(func, args, kwargs or {})


def inner_of(value: Any) -> Any:
    """Return a tensor's numbers, and anything else as it is."""
    return value.inner if isinstance(value, DeviceTensor) else value


class Everywhere(TorchDispatchMode):
    """Sends to the simulation what a thread does without any tensor of the device, such as making one."""

    def __init__(self, simulation: Device) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._simulation.run(func, args, kwargs or {})
