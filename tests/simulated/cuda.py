"""`torch.cuda` over a simulated device."""

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
import torch._dynamo  # torch imports it where a mode is active first, and has to find itself as it is
from torch import nn
from torch.utils._pytree import tree_map

from tests.simulated.device import Device
from tests.simulated.graph import Graph
from tests.simulated.kernels import watched_kernels
from tests.simulated.order import Event, Stream
from tests.simulated.tensor import GPU, DeviceTensor, Everywhere

PROPERTIES = SimpleNamespace(name="simulated", major=9, minor=0, multi_processor_count=2, total_memory=80 << 30)
CUDA, META = 1, 14
"""Numbers of c10::DeviceType."""


@contextmanager
def simulated_cuda(seed: int = 0) -> Iterator[Device]:
    """Have torch find a CUDA device, `cuda:0`, in this thread and those that are started meanwhile.

    In `torch.inference_mode`, as all our computing is. Nothing may be left on the device afterwards.

    Args:
        seed: of what is left to chance.
    """
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
    """Return a model after moving it to the device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                there = device.on_device(parameter.data.clone())
                module._parameters[name] = nn.Parameter(there, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = device.on_device(buffer.clone())
    return model


@contextmanager
def _guard() -> Iterator[None]:
    """Have torch's C++ find somebody who makes a CUDA device the current one, as it does for every call.

    Where torch was built for the CPU alone nobody is registered, and where it was built for CUDA somebody who needs a
    driver. The one who does nothing, for `meta`, stands in.
    """
    library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[CUDA] = guards[CUDA], guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before


def _replaced(device: Device) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced: whose, its name, and by what."""
    for name, value in {
        "CUDAGraph": lambda: Graph(device),
        "Event": _event_of(device),
        "Stream": lambda *given: device.new_stream(),
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda *given: device.stream,
        "default_stream": lambda *given: device.default,
        "device": lambda *given: nullcontext(),
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *given: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda *given: PROPERTIES.name,
        "get_device_properties": lambda *given: PROPERTIES,
        "get_sync_debug_mode": lambda: device.strict,
        "graph_pool_handle": lambda: (0, 1),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: device.graph is not None,
        "set_sync_debug_mode": lambda mode: setattr(device, "strict", mode not in (False, 0, "default")),
        "stream": lambda stream: _on(device, stream),
        "synchronize": lambda *given: device.synchronize(),
    }.items():
        yield torch.cuda, name, value
    yield torch, "Generator", _Generator
    yield torch.Tensor, "is_pinned", lambda self, *given: device.is_pinned(self)
    yield torch.Tensor, "pin_memory", lambda self, *given: device.pin(self.clone())
    for name in ("tensor", "as_tensor"):
        yield torch, name, _maker(getattr(torch, name))
    yield threading.Thread, "run", _running(device, threading.Thread.run)


def _event_of(device: Device) -> type[Event]:
    class OfDevice(Event):
        def __init__(self, *, enable_timing: bool = False) -> None:
            super().__init__(device.host, timed=enable_timing)

    return OfDevice


class _Generator(torch.Generator):
    """On the CPU, where the numbers are."""

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
    """Return what makes a tensor of data as torch does: on the host, and then it is copied."""

    def made(data: Any, *, device: Any = None, **given: Any) -> Any:
        if isinstance(data, DeviceTensor):
            return data.to(device or GPU, given.get("dtype") or data.dtype)
        data = tree_map(lambda one: one.item() if isinstance(one, DeviceTensor) else one, data)
        on_host = make(data, **given)
        return on_host.to(GPU) if device is not None and torch.device(device).type == "cuda" else on_host

    return made


def _running(device: Device, run: Any) -> Any:
    def everywhere(self: threading.Thread) -> None:
        with torch.inference_mode(), Everywhere(device):
            run(self)

    return everywhere
