"""Stored keys and values on their way: read by a thread, layer by layer, and placed when a pass gets to their layer.

A pass needs the first layer first, so reading goes on while it computes (CacheBlend, arXiv 2405.16444, section 5): what
a request waits for is the first layer, and whatever its store is slower than its model.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.models.rope import AngleTables, LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.kernels.support import supports_placement
from qcfuse_rag.runtime.loading.device_timer import DeviceTimestamp
from qcfuse_rag.runtime.loading.host_to_device import HostToDevice, TransferHandle
from qcfuse_rag.runtime.loading.wait_budget import WaitBudget
from qcfuse_rag.runtime.placement import copy_layer, stage_layer
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.quantization import side_block

AHEAD_BYTES = 256 << 20
"""What may be on a device beside the buffer before it is placed; half of it at most once placing was launched."""


Wait = tuple[DeviceTimestamp, DeviceTimestamp]
"""From when to when the device that computes had nothing to do, or placed what came."""


class LateMissError(Exception):
    """Stored chunks that turned out not to be there after a pass had begun; the request goes on without them.

    Attributes:
        misses: by the position of each chunk, why.
        corrupt: positions of those whose bytes were damaged.
    """

    def __init__(self, misses: Mapping[int, Miss], corrupt: Sequence[int] = ()) -> None:
        super().__init__("; ".join(sorted({miss.reason for miss in misses.values()})))
        self.misses, self.corrupt = dict(misses), tuple(corrupt)


@dataclass(slots=True, eq=False)
class PendingChunk:
    """A chunk on its way to position `start`; `read` holds the blocks that were read and are not placed yet."""

    start: int
    chunk: ChunkKV
    read: dict[str, Tensor] = field(default_factory=dict)


class LayerLoader:
    """Brings chunks into a buffer while a pass runs over it.

    For one request: `wait` is called by the thread that computes.

    Args:
        buffer: where to.
        ropes: rotation of each layer.
        parts: the chunks.
        transfer: takes what is read to the buffer's device; None leaves that to placing.
        patience: of the request.

    Attributes:
        waits: of passes so far.
        nbytes: bytes placed so far.
    """

    def __init__(
        self,
        buffer: KVBuffer,
        ropes: Sequence[LayerRope],
        parts: Sequence[PendingChunk],
        *,
        transfer: HostToDevice | None,
        wait_budget: WaitBudget,
    ) -> None:
        self._buffer: KVBuffer | None = buffer
        self._device = buffer.keys[0].device
        self._ropes, self._parts = ropes, parts
        self._transfer, self._wait_budget = transfer, wait_budget
        self._views = [part.chunk.with_blocks(part.read, part.chunk.numbers) for part in parts]
        self._layers: queue.SimpleQueue[LateMissError | TransferHandle | None] = queue.SimpleQueue()
        self._next_up: LateMissError | TransferHandle | None = None
        self._angles: AngleTables = {}
        self._together = transfer is not None and all(
            supports_placement(part.chunk.numbers, transfer.device) and side_block(part.chunk.numbers) != "basis"
            for part in parts
        )
        self._placed = 0
        self._leaving: deque[tuple[int, torch.cuda.Event]] = deque()
        self._freed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopped = False
        self.waits: list[Wait] = []
        self.nbytes = 0
        threading.Thread(target=self._read, name="qcfuse-loading", daemon=True).start()

    def wait(self, layer: int | None = None) -> None:
        """Return when all chunks are in their places in a layer and those before it; None: in all layers.

        Raises:
            LateMiss: if one cannot be read, or not in time. The buffer is then of no use.
        """
        last = len(self._ropes) - 1 if layer is None else layer
        while True:
            self._free()  # before every wait: else the thread that reads may be waiting for this one
            if self._placed > last:
                return
            began = DeviceTimestamp.on(self._device)
            try:
                with self._wait_budget.waiting():
                    self._place([self._next(self._wait_budget.left_s), *self._also_here()])
            except LateMissError:
                self.stop()
                raise
            finally:
                self.waits.append((began, DeviceTimestamp.on(self._device)))

    def stop(self) -> None:
        """Read no more, and hold nothing that a thread which hangs would keep; safe to call again."""
        self._stopped = True
        self._freed.put(0)
        self._buffer, self._next_up = None, None
        self._angles.clear()

    def _next(self, limit_s: float | None) -> TransferHandle | None:
        """Return what the next layer's blocks were sent by; None where they are used as they were read."""
        item, self._next_up = self._next_up, None
        if item is None:
            try:
                item = self._layers.get(timeout=limit_s)
            except queue.Empty:
                late = Miss(self._wait_budget.exhausted)
                raise LateMissError({part.start: late for part in self._parts}) from None
        if isinstance(item, LateMissError):
            raise item
        return item

    def _also_here(self) -> list[TransferHandle]:
        """Return the same of later layers that have arrived as well, to be placed by the same launch.

        At most doubling what is placed, so that the device is busy while the host builds a long table.

        Where placing is no kernel there is no launch to save, and keys are best placed when they are about to be used.
        Blocks of low rank are wide only when they are placed: of those there is room for a layer.
        """
        found: list[TransferHandle] = []
        while self._together and len(found) < self._placed - 1 and self._next_up is None and not self._layers.empty():
            item = self._layers.get()
            if isinstance(item, TransferHandle) and item.here:
                found.append(item)
            else:
                self._next_up = item
        return found

    def _place(self, sent: Sequence[TransferHandle | None]) -> None:
        """Place the next layers."""
        buffer, staged, freed = self._buffer, [], 0
        assert buffer is not None
        for layer, one in enumerate(sent, start=self._placed):
            if one is not None:
                one.receive()
            for part, view in zip(self._parts, self._views, strict=True):
                try:
                    if self._transfer is not None and supports_placement(view.numbers, self._transfer.device):
                        staged += stage_layer(buffer, part.start, view, layer, rope=self._ropes[layer])
                    else:
                        copy_layer(buffer, part.start, view, layer, rope=self._ropes[layer], tables=self._angles)
                except (RuntimeError, ValueError) as error:  # blocks that are not what the chunk says
                    raise LateMissError({part.start: Miss(f"cannot be read: {error}")}) from error
                freed += sum(part.read.pop(name).nbytes for name in part.chunk.layer_names(layer))
        if staged:
            from qcfuse_rag.runtime.kernels.placement import place_blocks

            place_blocks(staged, self._angles)
        self._placed += len(sent)
        if self._placed == len(self._ropes):
            self._angles.clear()
        self.nbytes += freed
        leaving = sum(one.nbytes for one in sent if one is not None)
        if leaving:
            self._leaving.append((leaving, torch.cuda.current_stream(self._device).record_event()))

    def _free(self) -> None:
        """Let as much be read as the device has placed.

        What has been launched is let go of here long before the device gets to it. So that it does not pile up there,
        wait for the device where more than half of what may be there is being placed; that is no wait for a store.
        """
        while self._leaving:
            _, placed = self._leaving[0]
            if sum(nbytes for nbytes, _ in self._leaving) > AHEAD_BYTES // 2:
                placed.synchronize()
            elif not placed.query():  # type: ignore[no-untyped-call]
                return
            self._freed.put(self._leaving.popleft()[0])

    def _read(self) -> None:
        """Read everything in the order it is needed; run by the thread."""
        blamed: Sequence[PendingChunk] = self._parts
        ahead = 0
        try:
            with torch.inference_mode():
                for layer in range(len(self._ropes)):
                    read: list[tuple[PendingChunk, str, Tensor]] = []
                    for part in self._parts:
                        blamed = [part]
                        read += [(part, name, part.chunk.blocks[name]) for name in part.chunk.layer_names(layer)]
                        if self._stopped:
                            return
                    blocks, blamed = [block for _, _, block in read], self._parts
                    sent = None if self._transfer is None else self._transfer.send(blocks)
                    for (part, name, _), block in zip(read, blocks if sent is None else sent.brought, strict=True):
                        part.read[name] = block
                    self._layers.put(sent)
                    ahead += 0 if sent is None else sent.nbytes
                    while ahead > AHEAD_BYTES and not self._stopped:
                        ahead -= self._freed.get()
        except Exception as error:  # whatever it is, somebody is waiting
            corrupt = isinstance(error, CorruptEntry)
            miss = Miss(str(error) if corrupt else f"cannot be read: {error}")
            starts = [part.start for part in blamed]
            self._layers.put(LateMissError(dict.fromkeys(starts, miss), starts if corrupt else []))
