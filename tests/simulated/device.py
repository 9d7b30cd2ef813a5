"""The simulated device: keeps the rules while torch's operations, kernels and recorded graphs run."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.simulated.graph import Graph, spoil
from tests.simulated.memory import Lease, Memory, bytes_of
from tests.simulated.operations import CONVERTING, INDEXING, Operation, tensors_in
from tests.simulated.order import HOST, Clock, Stream, agent_of, deed_of
from tests.simulated.tensor import GPU, DeviceTensor, Everywhere

MOVING = {"aten::copy_", "aten::_to_copy", *INDEXING}
"""Which take operands on two devices."""


class Device:
    """A device and its host.

    Args:
        seed: of what is left to chance.

    Attributes:
        broken: what was done against the rules, and where.
        launched: how often what was launched, by name.
        waits: where the host waited for the device.
        strict: whether waiting is an error, as `torch.cuda.set_sync_debug_mode` says.
    """

    def __init__(self, seed: int = 0) -> None:
        self.broken: list[str] = []
        self.launched: Counter[str] = Counter()
        self.waits: list[str] = []
        self.strict = False
        self.memories: dict[int, Memory] = {}
        self.host = Clock()
        self.turn = threading.RLock()
        self._chance = Random(seed)
        self._streams: list[Stream] = []
        self._pinned: list[Lease] = []
        self._leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self._of_thread = threading.local()
        self._host_deeds = 0
        self.default = self.new_stream()

    # Streams.

    def new_stream(self) -> Stream:
        self._streams.append(Stream(HOST + 1 + len(self._streams), self.host, self._chance))
        return self._streams[-1]

    @property
    def stream(self) -> Stream:
        """The thread's."""
        return getattr(self._of_thread, "stream", None) or self.default

    @stream.setter
    def stream(self, stream: Stream | None) -> None:
        self._of_thread.stream = stream

    @property
    def graph(self) -> Graph | None:
        """What the thread records."""
        return getattr(self._of_thread, "graph", None)

    @graph.setter
    def graph(self, graph: Graph | None) -> None:
        self._of_thread.graph = graph

    def wait(self, why: str) -> None:
        """Have the host wait for what the thread has launched."""
        if self.strict or self.graph is not None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")
        self.waits.append(why)
        self.host.learn(self.stream.clock)

    def synchronize(self) -> None:
        self.wait("synchronize")
        for stream in self._streams:
            self.host.learn(stream.clock)

    # Memory.

    def memory_of(self, inner: Tensor) -> Memory | None:
        return self.memories.get(inner.untyped_storage().data_ptr())

    def on_device(self, inner: Tensor) -> DeviceTensor:
        """Return numbers as a tensor of the device, in memory of the thread's stream if it is new."""
        storage = inner.untyped_storage()
        base = storage.data_ptr()
        memory, lease = self.memories.get(base), self._leases.get(base)
        if memory is None or lease is None:
            memory, lease = Memory(base, storage.nbytes(), self.stream.number), Lease(storage)
            if self.graph is not None:
                memory.graph = True
                self.graph.own(memory, inner)
            self.memories[base], self._leases[base] = memory, lease
            weakref.finalize(lease, self._free, memory).atexit = False
        return DeviceTensor(inner, memory, lease, self)

    def pin(self, tensor: Tensor) -> Tensor:
        """Take note that a tensor of the host lies in page-locked memory."""
        storage = tensor.untyped_storage()
        self._pinned.append(Lease(storage))
        self.memories[storage.data_ptr()] = Memory(storage.data_ptr(), storage.nbytes(), HOST, pinned=True)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        memory = None if isinstance(tensor, DeviceTensor) else self.memory_of(tensor)
        return memory is not None and memory.pinned

    def _free(self, memory: Memory) -> None:
        """Free memory: its stream may have it again at once, so nobody else may be at it still."""
        memory.free = True
        if memory.graph:
            return
        self.memories.pop(memory.base, None)
        owner = self._streams[memory.stream - 1]
        for deed in memory.last_uses():
            user = agent_of(deed)
            known = owner.clock.knows(deed) or self.host.knows(deed)
            if deed and user not in (HOST, memory.stream, *memory.told) and not known:
                self.complain(f"memory of stream {memory.stream} is freed while stream {user} is perhaps at it")
                return

    def use(self, memory: Memory, where: object, deed: int, *, write: bool, what: str) -> None:
        """Note that bytes are used, and whether they may be."""
        if self.graph is not None:
            return
        agent = agent_of(deed)
        clock = self.host if agent == HOST else self._streams[agent - 1].clock
        wrong = memory.conflict(where, deed, clock, write=write)
        if wrong is not None:
            self.complain(f"{what} on stream {agent} {wrong}")
        if write:
            memory.written[where] = deed  # type: ignore[index]
        else:
            memory.note_read(where, deed)

    def use_tensors(self, tensors: list[Tensor], deed: int, *, write: bool, what: str) -> None:
        for inner in tensors:
            memory = self.memory_of(inner)
            if memory is not None and inner.numel():
                self.use(memory, bytes_of(inner), deed, write=write, what=what)

    def complain(self, text: str) -> None:
        where = [frame for frame in traceback.extract_stack() if "/tests/simulated/" not in frame.filename]
        self.broken.append(f"{text}\n{''.join(traceback.format_list(where[-8:]))}")

    # What is launched.

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of torch's operations, wherever its operands are."""
        with self.turn:
            name = func._schema.name
            if name in CONVERTING and (name != "aten::to" or any(map(_is_device, (*args, *kwargs.values())))):
                with Everywhere(self):
                    return func.decompose(*tree_map(_named, args), **tree_map(_named, kwargs))
            given = tensors_in((args, kwargs))
            target = kwargs.get("device")
            to_device = target is not None and torch.device(target).type == "cuda"
            if to_device or any(isinstance(one, DeviceTensor) for one in given):
                return self._launch(func, args, kwargs)
            return self._on_host(Operation(func, args, kwargs))

    def _on_host(self, operation: Operation) -> Any:
        """Run what the device has no part in; it may still be reading page-locked memory."""
        pinned = operation.kwargs.pop("pin_memory", None)
        for one in operation.written():
            if self.is_pinned(one):
                self._host_deeds += 1
                self.host[HOST] = deed = deed_of(HOST, self._host_deeds)
                self.use_tensors([one], deed, write=True, what=f"{operation.name} of the host")
        result = operation.compute()
        return self.pin(result) if pinned else result

    def _launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name == "aten::_has_compatible_shallow_copy_type":
            return False
        given = tensors_in((args, kwargs))
        there = [isinstance(one, DeviceTensor) for one in given]
        target = kwargs.get("device")
        down = target is not None and torch.device(target).type == "cpu"
        name = func._schema.name
        if name == "aten::copy_" and not isinstance(args[0], DeviceTensor):
            down = True
        strangers = [one for one, on in zip(given, there, strict=True) if not on and one.dim() > 0]
        if strangers and any(there) and name not in MOVING:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        wrappers = {id(one.inner): one for one in given if isinstance(one, DeviceTensor)}
        operation = Operation(func, tree_map(_inner, args), tree_map(_inner, {**kwargs, "pin_memory": None}))
        operation.kwargs.pop("pin_memory")
        waiting = down or operation.waits(there) or self._waits_for_copy(operation, strangers, down=down)
        if waiting and self.graph is not None:
            self.wait(name)
        written = operation.written()
        if self.graph is not None:
            self.graph.about_to(operation, written, self.memory_of)
        result = operation.compute()
        results = tensors_in(result)
        fresh = [] if down else operation.fresh(results)
        if fresh or written or waiting:
            deed = self._act(name)
            self.use_tensors(operation.reads(), deed, write=False, what=name)
            self.use_tensors(written, deed, write=True, what=name)
        if not down:
            result = tree_map(lambda one: self._wrapped(one, wrappers), result)
        if fresh or written:
            if "empty" in name:
                for one in fresh:
                    spoil(one)
            else:
                self.use_tensors(fresh, deed, write=True, what=name)
            if self.graph is not None:
                self.graph.record(operation, results, fresh)
        if waiting:
            self.wait(name)
        return result

    def launch_kernel(self, name: str, compute: Callable[[], None]) -> None:
        """Run a kernel, which says by `tests.simulated.kernels` what it touches."""
        with self.turn:
            self._of_thread.kernel = name, self._act(name)
            try:
                compute()
            finally:
                self._of_thread.kernel = None
            if self.graph is not None:
                self.graph.record_kernel(name, compute)

    @property
    def kernel(self) -> tuple[str, int] | None:
        """The kernel the thread runs, and the deed that is."""
        return getattr(self._of_thread, "kernel", None)

    def _act(self, name: str) -> int:
        if self.graph is not None:
            return 0
        self.launched[name] += 1
        return self.stream.act()

    def _wrapped(self, value: Any, wrappers: dict[int, DeviceTensor]) -> Any:
        if not isinstance(value, Tensor):
            return value
        wrapper = wrappers.get(id(value))
        return self.on_device(value) if wrapper is None else wrapper

    def _waits_for_copy(self, operation: Operation, strangers: list[Tensor], *, down: bool) -> bool:
        """Return whether the host waits for what is copied from it, as torch has it wait unless told otherwise.

        Of memory that is not page-locked, CUDA takes a copy before it lets go of the host, and waits for nothing.
        """
        if down or operation.name not in MOVING - INDEXING or not any(one.numel() for one in strangers):
            return False
        told = operation.kwargs.get("non_blocking") or (operation.name == "aten::copy_" and True in operation.args[2:])
        if told and self.graph is not None and not all(map(self.is_pinned, strangers)):
            raise RuntimeError("a copy from memory that is not page-locked was recorded")
        return not told


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) or value in ("cpu", "cuda", "cuda:0")


def _named(value: Any) -> Any:
    return GPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _inner(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) else value
