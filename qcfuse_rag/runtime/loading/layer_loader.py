"""Load stored chunks layer by layer: a thread reads them, and a pass places each layer when it reaches it.

A pass needs the first layer first, so reading goes on while it computes (CacheBlend, arXiv 2405.16444, section 5). A
request waits only for the first layer, and for later ones if its store is slower than its model.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

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
"""Limit on bytes that are on the device but not placed yet, and half of it for what is sent at once. At most half of it
may wait for launched placements."""
GROWTH = 3
"""How many layers are sent at once: of page-locked memory so many times as before."""


WaitInterval = tuple[DeviceTimestamp, DeviceTimestamp]
"""Beginning and end of a time in which the computing device was idle, or placed loaded blocks."""

SentLayers = tuple[int, TransferHandle | None]
"""How many next layers were read, and the transfer of their blocks; None if they are used as they were read."""


class LateMissError(Exception):
    """Stored chunks that could not be read after a pass had begun; the request goes on without them.

    Attributes:
        misses: the reason for each chunk, by its position.
        corrupt: positions of the chunks whose bytes were damaged.
    """

    def __init__(self, misses: Mapping[int, Miss], corrupt: Sequence[int] = ()) -> None:
        super().__init__("; ".join(sorted({miss.reason for miss in misses.values()})))
        self.misses, self.corrupt = dict(misses), tuple(corrupt)


@dataclass(slots=True, eq=False)
class LoadingChunk:
    """A chunk that is being loaded.

    Attributes:
        start: position of its first token in the prompt.
        chunk: the stored chunk.
        read: blocks that were read and are not placed yet, by name.
    """

    start: int
    chunk: ChunkKV
    read: dict[str, Tensor] = field(default_factory=dict)


class LayerLoader:
    """Loads one request's chunks into its buffer while a pass runs over the buffer.

    Chunks in page-locked memory are sent by several layers at once, the first layer alone: one copy for each chunk. To
    read others takes longer than to start their copies, so each layer is sent as soon as it is read.

    The thread that computes calls `wait` and `stop`.

    Args:
        buffer: receives the chunks.
        ropes: rotation of each layer.
        chunks: the chunks.
        transfer: copies the blocks to the buffer's device; None if placement does so.
        wait_budget: the request's budget for waits.

    Attributes:
        waits: waits of passes so far.
        nbytes: bytes placed so far.
    """

    def __init__(
        self,
        buffer: KVBuffer,
        ropes: Sequence[LayerRope],
        chunks: Sequence[LoadingChunk],
        *,
        transfer: HostToDevice | None,
        wait_budget: WaitBudget,
    ) -> None:
        self._buffer: KVBuffer | None = buffer
        self._device = buffer.keys[0].device
        self._ropes, self._chunks = ropes, chunks
        self._transfer, self._wait_budget = transfer, wait_budget
        self._read_chunks = [loading.chunk.with_blocks(loading.read, loading.chunk.numbers) for loading in chunks]
        self._layers: queue.SimpleQueue[LateMissError | SentLayers] = queue.SimpleQueue()
        self._peeked: LateMissError | SentLayers | None = None
        self._angles: AngleTables = {}
        self._places_several_layers = transfer is not None and all(
            supports_placement(loading.chunk.numbers, transfer.device) and side_block(loading.chunk.numbers) != "basis"
            for loading in chunks
        )
        self._n_placed = 0
        self._placing: deque[tuple[int, torch.cuda.Event]] = deque()
        self._released: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopped = False
        self.waits: list[WaitInterval] = []
        self.nbytes = 0
        threading.Thread(target=self._read, name="qcfuse-loading", daemon=True).start()

    def wait(self, layer: int | None = None) -> None:
        """Wait until all chunks are placed in a layer and in those before it; None waits for all layers.

        Raises:
            LateMissError: if a chunk cannot be read, or not in time. The buffer is then unusable.
        """
        last = len(self._ropes) - 1 if layer is None else layer
        while True:
            self._release_placed()  # before every wait, because the reading thread may be waiting for released bytes
            if self._n_placed > last:
                return
            began = DeviceTimestamp.on(self._device)
            try:
                with self._wait_budget.waiting():
                    self._place([self._next_layers(self._wait_budget.left_s), *self._arrived_layers()])
            except LateMissError:
                self.stop()
                raise
            finally:
                self.waits.append((began, DeviceTimestamp.on(self._device)))

    def stop(self) -> None:
        """Stop reading, and drop all references that a hanging thread would keep alive; safe to call again."""
        self._stopped = True
        self._released.put(0)
        self._buffer, self._peeked = None, None
        self._angles.clear()

    def _next_layers(self, limit_s: float | None) -> SentLayers:
        """Return the layers that were sent next, once they are sent."""
        item, self._peeked = self._peeked, None
        if item is None:
            try:
                item = self._layers.get(timeout=limit_s)
            except queue.Empty:
                late = Miss(self._wait_budget.timeout_reason)
                raise LateMissError({loading.start: late for loading in self._chunks}) from None
        if isinstance(item, LateMissError):
            raise item
        return item

    def _arrived_layers(self) -> list[SentLayers]:
        """Return later layers whose transfers are complete too, to be placed by the same kernel launch.

        About as many as are placed already: the device stays busy while the host builds a long table.

        Without a placement kernel no launch is saved, and keys are best placed just before they are used. Low-rank
        blocks grow to full size when they are placed, and there is memory for one layer of those.
        """
        arrived: list[SentLayers] = []
        while (
            self._places_several_layers
            and sum(count for count, _ in arrived) < self._n_placed - 1
            and self._peeked is None
            and not self._layers.empty()
        ):
            item = self._layers.get()
            if isinstance(item, tuple) and item[1] is not None and item[1].is_complete:
                arrived.append(item)
            else:
                self._peeked = item
        return arrived

    def _place(self, sent: Sequence[SentLayers]) -> None:
        """Place the next layers."""
        buffer, staged, placed_bytes, transferred, next_layer = self._buffer, [], 0, 0, self._n_placed
        assert buffer is not None
        for count, transfer in sent:
            if transfer is not None:
                transfer.receive()
                transferred += transfer.nbytes
            layers, next_layer = range(next_layer, next_layer + count), next_layer + count
            for layer, (loading, chunk) in product(layers, zip(self._chunks, self._read_chunks, strict=True)):
                try:
                    if self._transfer is not None and supports_placement(chunk.numbers, self._transfer.device):
                        staged += stage_layer(buffer, loading.start, chunk, layer, rope=self._ropes[layer])
                    else:
                        copy_layer(buffer, loading.start, chunk, layer, rope=self._ropes[layer], tables=self._angles)
                except (RuntimeError, ValueError) as error:  # the blocks do not match the chunk's header
                    raise LateMissError({loading.start: Miss(f"cannot be read: {error}")}) from error
                placed_bytes += sum(loading.read.pop(name).nbytes for name in loading.chunk.layer_names(layer))
        if staged:
            from qcfuse_rag.runtime.kernels.placement import place_blocks

            place_blocks(staged, self._angles)
        self._n_placed = next_layer
        if self._n_placed == len(self._ropes):
            self._angles.clear()
        self.nbytes += placed_bytes
        if transferred:
            self._placing.append((transferred, torch.cuda.current_stream(self._device).record_event()))

    def _release_placed(self) -> None:
        """Apply back-pressure: let the reading thread continue by as many bytes as the device has placed.

        The host drops placed blocks long before the device has placed them. To bound the memory they use until then,
        wait for the device while more than AHEAD_BYTES / 2 are being placed. This wait is not one for the store.
        """
        while self._placing:
            nbytes, placed = self._placing[0]
            if sum(pending for pending, _ in self._placing) > AHEAD_BYTES // 2:
                placed.synchronize()
            elif not placed.query():  # type: ignore[no-untyped-call]
                return
            self._placing.popleft()
            self._released.put(nbytes)

    def _read(self) -> None:
        """Read all blocks in the order in which passes need them; this is the thread's function.

        An error ends the thread and is queued as a `LateMissError` of the chunk being read, or of all chunks if it
        happens in a transfer.
        """
        failing: Sequence[LoadingChunk] = self._chunks
        ahead, first, count = 0, 0, 1
        try:
            with torch.inference_mode():
                while first < len(self._ropes):
                    layers = range(first, min(first + count, len(self._ropes)))
                    read: list[tuple[LoadingChunk, str, Tensor]] = []
                    for loading in self._chunks:
                        failing = [loading]
                        names = (name for layer in layers for name in loading.chunk.layer_names(layer))
                        read += [(loading, name, loading.chunk.blocks[name]) for name in names]
                        if self._stopped:
                            return
                    blocks, failing = [block for _, _, block in read], self._chunks
                    sent = None if self._transfer is None else self._transfer.send(blocks)
                    for (loading, name, _), block in zip(read, blocks if sent is None else sent.tensors, strict=True):
                        loading.read[name] = block
                    self._layers.put((len(layers), sent))
                    ahead += 0 if sent is None else sent.nbytes
                    while ahead > AHEAD_BYTES and not self._stopped:
                        ahead -= self._released.get()
                    first, count = layers.stop, self._next_count(len(layers), blocks)
        except Exception as error:  # a pass may be waiting, whatever the error is
            corrupt = isinstance(error, CorruptEntry)
            miss = Miss(str(error) if corrupt else f"cannot be read: {error}")
            starts = [loading.start for loading in failing]
            self._layers.put(LateMissError(dict.fromkeys(starts, miss), starts if corrupt else []))

    def _next_count(self, count: int, blocks: Sequence[Tensor]) -> int:
        """Return how many layers to send at once after so many layers of these blocks."""
        device = None if self._transfer is None else self._transfer.device
        if not self._places_several_layers or not all(block.device == device or block.is_pinned() for block in blocks):
            return 1
        layer_bytes = sum(block.nbytes for block in blocks) // count
        return max(1, min(GROWTH * count, AHEAD_BYTES // 2 // max(1, layer_bytes)))
