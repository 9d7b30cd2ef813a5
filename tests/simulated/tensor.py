"""Tensors that report a CUDA device and send all their operations to the simulation."""

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
    """A tensor on the simulated device."""

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

    def is_contiguous(self, **options: Any) -> bool:
        return self.inner.is_contiguous(**options)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded_streams.add(stream.number)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
        simulation = next(item.simulation for item in flat if isinstance(item, DeviceTensor))
        return simulation.run(func, args, kwargs or {})


def inner_of(value: Any) -> Any:
    """Return the CPU data of a device tensor, and any other value unchanged."""
    return value.inner if isinstance(value, DeviceTensor) else value


class Everywhere(TorchDispatchMode):
    """Sends a thread's operations without device tensors to the simulation, such as creating one."""

    def __init__(self, simulation: Device) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._simulation.run(func, args, kwargs or {})
