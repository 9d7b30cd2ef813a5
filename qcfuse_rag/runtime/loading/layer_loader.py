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
"""Limit on bytes that are on the device but not placed yet. At most half of it may wait for launched placements."""


WaitInterval = tuple[DeviceTimestamp, DeviceTimestamp]
"""Beginning and end of a time in which the computing device was idle, or placed loaded blocks."""


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
        self._layers: queue.SimpleQueue[LateMissError | TransferHandle | None] = queue.SimpleQueue()
        self._peeked: LateMissError | TransferHandle | None = None
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
                    self._place([self._next_layer(self._wait_budget.left_s), *self._arrived_layers()])
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

    def _next_layer(self, limit_s: float | None) -> TransferHandle | None:
        """Return the transfer of the next layer's blocks; None if they are used as they were read."""
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

    def _arrived_layers(self) -> list[TransferHandle]:
        """Return the transfers of later layers that are complete too, to be placed by the same kernel launch.

        At most as many as are placed already: the device stays busy while the host builds a long table.

        Without a placement kernel no launch is saved, and keys are best placed just before they are used. Low-rank
        blocks grow to full size when they are placed, and there is memory for one layer of those.
        """
        arrived: list[TransferHandle] = []
        while (
            self._places_several_layers
            and len(arrived) < self._n_placed - 1
            and self._peeked is None
            and not self._layers.empty()
        ):
            item = self._layers.get()
            if isinstance(item, TransferHandle) and item.is_complete:
                arrived.append(item)
            else:
                self._peeked = item
        return arrived

    def _place(self, transfers: Sequence[TransferHandle | None]) -> None:
        """Place the next layers, one for each transfer."""
        buffer, staged, placed_bytes = self._buffer, [], 0
        assert buffer is not None
        for layer, transfer in enumerate(transfers, start=self._n_placed):
            if transfer is not None:
                transfer.receive()
            for loading, chunk in zip(self._chunks, self._read_chunks, strict=True):
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
        self._n_placed += len(transfers)
        if self._n_placed == len(self._ropes):
            self._angles.clear()
        self.nbytes += placed_bytes
        transferred = sum(transfer.nbytes for transfer in transfers if transfer is not None)
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
        ahead = 0
        try:
            with torch.inference_mode():
                for layer in range(len(self._ropes)):
                    read: list[tuple[LoadingChunk, str, Tensor]] = []
                    for loading in self._chunks:
                        failing = [loading]
                        names = loading.chunk.layer_names(layer)
                        read += [(loading, name, loading.chunk.blocks[name]) for name in names]
                        if self._stopped:
                            return
                    blocks, failing = [block for _, _, block in read], self._chunks
                    sent = None if self._transfer is None else self._transfer.send(blocks)
                    for (loading, name, _), block in zip(read, blocks if sent is None else sent.tensors, strict=True):
                        loading.read[name] = block
                    self._layers.put(sent)
                    ahead += 0 if sent is None else sent.nbytes
                    while ahead > AHEAD_BYTES and not self._stopped:
                        ahead -= self._released.get()
        except Exception as error:  # a pass may be waiting, whatever the error is
            corrupt = isinstance(error, CorruptEntry)
            miss = Miss(str(error) if corrupt else f"cannot be read: {error}")
            starts = [loading.start for loading in failing]
            self._layers.put(LateMissError(dict.fromkeys(starts, miss), starts if corrupt else []))
