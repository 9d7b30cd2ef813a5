"""The simulated device: checks its rules while torch's operations and kernels run."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.simulated.memory import Lease, Memories, Memory, bytes_of
from tests.simulated.operations import CONVERTING, MOVING, Operation, tensors_in
from tests.simulated.order import HOST, Host, Stream, agent_of, epoch_of
from tests.simulated.tensor import GPU, DeviceTensor, Everywhere, inner_of


class Device:
    """A device and its host."""

    def __init__(self, seed: int = 0) -> None:
        self.broken: list[str] = []
        self.launched: Counter[str] = Counter()
        self.memories = Memories()
        self.host = Host(seed)
        self.lock = self.host.lock
        self._streams: list[Stream] = []
        self._pinned: list[Lease] = []
        self._leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self._of_thread = threading.local()
        self._host_epochs = 0
        self.default = self.new_stream()

    # Streams.

    def new_stream(self) -> Stream:
        self._streams.append(Stream(HOST + 1 + len(self._streams), self.host))
        return self._streams[-1]

    @property
    def stream(self) -> Stream:
        """The current stream of the thread."""
        return getattr(self._of_thread, "stream", None) or self.default

    @stream.setter
    def stream(self, stream: Stream | None) -> None:
        self._of_thread.stream = stream

    def wait(self, why: str) -> None:
        """Make the host wait for everything that the thread has launched."""
        self.host.wait(self.stream.clock, why)

    def synchronize(self) -> None:
        self.wait("synchronize")
        with self.lock:
            for stream in self._streams:
                self.host.clock.learn(stream.clock)

    # Memory.

    def memory_of(self, inner: Tensor) -> Memory | None:
        return self.memories.get(inner.untyped_storage().data_ptr())

    def on_device(self, inner: Tensor) -> DeviceTensor:
        """Wrap a CPU tensor as a tensor of the device; new memory belongs to the thread's stream."""
        storage = inner.untyped_storage()
        base = storage.data_ptr()
        memory, lease = self.memories.get(base), self._leases.get(base)
        if memory is None or lease is None:
            memory, lease = Memory(base, storage.nbytes(), self.stream.number), Lease(storage)
            self.memories[base], self._leases[base] = memory, lease
            weakref.finalize(lease, self._free, memory).atexit = False
        return DeviceTensor(inner, memory, lease, self)

    def pin(self, tensor: Tensor) -> Tensor:
        """Note that a tensor of the host is in page-locked memory."""
        storage = tensor.untyped_storage()
        self._pinned.append(Lease(storage))
        self.memories[storage.data_ptr()] = Memory(storage.data_ptr(), storage.nbytes(), HOST, pinned=True)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        memory = None if isinstance(tensor, DeviceTensor) else self.memory_of(tensor)
        return memory is not None and memory.pinned

    def _free(self, memory: Memory) -> None:
        """Free memory: its stream may reuse it at once, so no other stream may still use it."""
        self.memories.pop(memory.base, None)
        owner = self._streams[memory.stream - 1]
        for epoch in memory.last_uses():
            user = agent_of(epoch)
            known = owner.clock.knows(epoch) or self.host.clock.knows(epoch)
            if epoch and user not in (HOST, memory.stream, *memory.recorded_streams) and not known:
                self.complain(f"memory of stream {memory.stream} is freed while stream {user} is perhaps at it")
                return

    def use(self, memory: Memory, where: object, epoch: int, *, write: bool, what: str) -> None:
        """Note the use of bytes, and complain if it breaks a rule."""
        agent = agent_of(epoch)
        clock = self.host.clock if agent == HOST else self._streams[agent - 1].clock
        conflict = memory.conflict(where, epoch, clock, write=write)
        if conflict is not None:
            self.complain(f"{what} {'by the host' if agent == HOST else f'on stream {agent}'} {conflict}")
        if write:
            memory.written[where] = epoch  # type: ignore[index]
        else:
            memory.note_read(where, epoch)

    def use_tensors(self, tensors: list[Tensor], epoch: int, *, write: bool, what: str) -> None:
        for inner in tensors:
            memory = self.memory_of(inner)
            if memory is not None and inner.numel():
                self.use(memory, bytes_of(inner), epoch, write=write, what=what)

    def complain(self, text: str) -> None:
        where = [frame for frame in traceback.extract_stack() if "/tests/simulated/" not in frame.filename]
        self.broken.append(f"{text}\n{''.join(traceback.format_list(where[-8:]))}")

    # What is launched.

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of torch's operations on the host or the device, depending on its operands."""
        with self.lock:
            name = func._schema.name
            if name == "aten::_foreach_copy_":  # between devices, torch copies one after the other
                for target, source in zip(*args[:2], strict=True):
                    self.run(torch.ops.aten.copy_.default, (target, source, *args[2:]), kwargs)
                return None
            if name in CONVERTING and (name != "aten::to" or any(map(_is_device, (*args, *kwargs.values())))):
                with Everywhere(self):
                    return func.decompose(*tree_map(_named, args), **tree_map(_named, kwargs))
            operands = tensors_in((args, kwargs))
            target = kwargs.get("device")
            to_device = target is not None and torch.device(target).type == "cuda"
            if to_device or any(isinstance(tensor, DeviceTensor) for tensor in operands):
                return self._launch(func, args, kwargs)
            return self._on_host(Operation(func, args, kwargs))

    def _on_host(self, operation: Operation) -> Any:
        """Run an operation without device tensors; the device may still read page-locked memory that it writes."""
        pinned = operation.kwargs.pop("pin_memory", None)
        for tensor in operation.written():
            if self.is_pinned(tensor):
                self._host_epochs += 1
                self.host.clock[HOST] = epoch = epoch_of(HOST, self._host_epochs)
                self.use_tensors([tensor], epoch, write=True, what=operation.name)
        result = operation.compute()
        return self.pin(result) if pinned else result

    def _launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name == "aten::_has_compatible_shallow_copy_type":
            return False
        operands = tensors_in((args, kwargs))
        on_device = [isinstance(tensor, DeviceTensor) for tensor in operands]
        target = kwargs.get("device")
        to_host = target is not None and torch.device(target).type == "cpu"
        name = func._schema.name
        if name == "aten::copy_" and not isinstance(args[0], DeviceTensor):
            to_host = True
        wrappers = {id(tensor.inner): tensor for tensor in operands if isinstance(tensor, DeviceTensor)}
        operation = Operation(func, tree_map(_inner, args), tree_map(_inner, {**kwargs, "pin_memory": None}))
        operation.kwargs.pop("pin_memory")
        from_host = [] if to_host else operation.host_operands(on_device)
        if from_host and any(on_device) and name not in MOVING:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        if to_host and operation.non_blocking:
            self.complain(f"{name} to the host is not waited for")
        waiting = to_host or operation.waits(on_device) or operation.waits_for_copy(from_host, self.is_pinned)
        written = operation.written()
        result = operation.compute()
        results = tensors_in(result)
        fresh = [] if to_host else operation.fresh(results)
        if fresh or written or waiting:
            epoch = self._tick(name)
            self.use_tensors(operation.reads(), epoch, write=False, what=name)
            self.use_tensors(written, epoch, write=True, what=name)
        if not to_host:
            result = tree_map(lambda value: self._wrapped(value, wrappers), result)
        if fresh or written:
            if "empty" in name:
                for tensor in fresh:
                    poison(tensor)
            else:
                self.use_tensors(fresh, epoch, write=True, what=name)
        if waiting:
            self.wait(name)
        return result

    def launch_kernel(self, name: str, compute: Callable[[], None]) -> None:
        """Run a kernel; `tests.simulated.kernels` reports the memory it touches."""
        with self.lock:
            self._of_thread.kernel = name, self._tick(name)
            try:
                compute()
            finally:
                self._of_thread.kernel = None

    @property
    def kernel(self) -> tuple[str, int] | None:
        """The kernel that the thread runs, and its epoch."""
        return getattr(self._of_thread, "kernel", None)

    def _tick(self, name: str) -> int:
        self.launched[name] += 1
        return self.stream.tick()

    def _wrapped(self, value: Any, wrappers: dict[int, DeviceTensor]) -> Any:
        if not isinstance(value, Tensor):
            return value
        wrapper = wrappers.get(id(value))
        return self.on_device(value) if wrapper is None else wrapper


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) or value in ("cpu", "cuda", "cuda:0")


def _named(value: Any) -> Any:
    return GPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _inner(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else inner_of(value)


def poison(tensor: Tensor) -> None:
    """Fill uninitialised memory with values that show up in results."""
    if tensor.numel():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
