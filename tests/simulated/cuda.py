"""Replace `torch.cuda` with a simulated device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # imported before anything is replaced; torch imports it on the first use of a dispatch mode
from torch import nn
from torch.utils._pytree import tree_map

from qcfuse_rag.runtime.loading import host_to_device
from tests.simulated.device import Device
from tests.simulated.kernels import watched_kernels
from tests.simulated.order import Event, Stream
from tests.simulated.tensor import GPU, DeviceTensor, Everywhere

PROPERTIES = SimpleNamespace(name="simulated", major=9, minor=0, multi_processor_count=2, total_memory=80 << 30)
CUDA, META = 1, 14
"""Values of c10::DeviceType."""


@contextmanager
def simulated_cuda(seed: int = 0) -> Iterator[Device]:
    """Simulate a CUDA device, `cuda:0`, in this thread and in threads that it starts.

    Runs in `torch.inference_mode`, as the package does. No tensor may stay on the device afterwards."""
    device = Device(seed)
    with ExitStack() as stack:
        stack.enter_context(_guard())
        for owner, name, value in _replaced(device):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(watched_kernels(device))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(Everywhere(device))
        yield device


def moved(model: nn.Module, device: Device) -> nn.Module:
    """Move a model to the device and return it."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                on_device = device.on_device(parameter.data.clone())
                module._parameters[name] = nn.Parameter(on_device, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = device.on_device(buffer.clone())
    return model


@contextmanager
def _guard() -> Iterator[None]:
    """Replace torch's C++ guard that makes a CUDA device current, which every call uses.

    A CPU build of torch has no such guard, and that of a CUDA build needs a driver. The guard of `meta`, which does
    nothing, replaces it.
    """
    library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[CUDA] = guards[CUDA], guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before


def _replaced(device: Device) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements: the owner, the attribute and its new value."""
    for name, value in {
        "Event": _event_of(device),
        "Stream": lambda *args, **kwargs: device.new_stream(),
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda *args: device.stream,
        "default_stream": lambda *args: device.default,
        "device": lambda *args: nullcontext(),
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *args: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda *args: PROPERTIES.name,
        "get_device_properties": lambda *args: PROPERTIES,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "stream": lambda stream: _on(device, stream),
        "synchronize": lambda *args: device.synchronize(),
    }.items():
        yield torch.cuda, name, value
    yield torch, "Generator", _Generator
    yield torch.Tensor, "is_pinned", lambda self, *args: device.is_pinned(self)
    yield torch.Tensor, "pin_memory", lambda self, *args: device.pin(self.clone())
    for name in ("tensor", "as_tensor"):
        yield torch, name, _maker(getattr(torch, name))
    yield host_to_device, "copy_bytes", lambda target, source: target.copy_(source)
    yield threading.Thread, "run", _running(device, threading.Thread.run)


def _event_of(device: Device) -> type[Event]:
    class OfDevice(Event):
        def __init__(self, *, enable_timing: bool = False) -> None:
            super().__init__(device.host, timed=enable_timing)

    return OfDevice


class _Generator(torch.Generator):
    """A generator on the CPU, because the simulation computes there."""

    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls)


@contextmanager
def _on(device: Device, stream: Stream) -> Iterator[None]:
    before, device.stream = device.stream, stream
    try:
        yield
    finally:
        device.stream = before


def _maker(make: Any) -> Any:
    """Return a function that creates a tensor from data as torch does: on the host, then copied to the device."""

    def made(data: Any, *, device: Any = None, **options: Any) -> Any:
        if isinstance(data, DeviceTensor):
            return data.to(device or GPU, options.get("dtype") or data.dtype)
        data = tree_map(lambda item: item.item() if isinstance(item, DeviceTensor) else item, data)
        on_host = make(data, **options)
        return on_host.to(GPU) if device is not None and torch.device(device).type == "cuda" else on_host

    return made


def _running(device: Device, run: Any) -> Any:
    def everywhere(self: threading.Thread) -> None:
        with torch.inference_mode(), Everywhere(device):
            run(self)

    return everywhere
