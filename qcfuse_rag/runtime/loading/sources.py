"""Chunks for the layer loader that are read block by block, in every format.

The store of a block reads it. `slab_source` sends chunks that lie in one allocation each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from torch import Tensor

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.models.rope import AngleTables, LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.placement import copy_layer, stage_layer
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.quantization import RANKS

if TYPE_CHECKING:
    from qcfuse_rag.runtime.loading.host_to_device import HostToDevice, TransferHandle

SentLayers = tuple[range, "TransferHandle | None"]
"""Layers that were read, and the transfer of their blocks; None if they are used as they were read."""


class LateMissError(Exception):
    """Stored chunks that could not be read after a pass had begun; the request goes on without them.

    Attributes:
        misses: the reason for each chunk, by its position.
        corrupt: positions of the chunks whose bytes were damaged.
    """

    def __init__(self, misses: Mapping[int, Miss], corrupt: Sequence[int] = ()) -> None:
        super().__init__("; ".join(sorted({miss.reason for miss in misses.values()})))
        self.misses, self.corrupt = dict(misses), tuple(corrupt)


@dataclass(frozen=True, slots=True, eq=False)
class LoadingChunk:
    """A chunk to be loaded, and the position of its first token in the prompt."""

    start: int
    chunk: ChunkKV


class BlockSource:
    """Chunks behind a store, or in memory.

    To read blocks takes longer than to start their copies, so each layer is sent as soon as it is read. Without a
    `transfer`, placement copies the blocks to the device.

    Attributes:
        needs_thread: whether reading can block; a thread then reads while a pass computes.
    """

    needs_thread = True

    def __init__(
        self,
        buffer: KVBuffer,
        ropes: Sequence[LayerRope],
        chunks: Sequence[LoadingChunk],
        transfer: HostToDevice | None,
    ) -> None:
        self._buffer: KVBuffer | None = buffer
        self._ropes, self._chunks, self._transfer = ropes, chunks, transfer
        self._blocks: list[dict[str, Tensor]] = [{} for _ in chunks]  # read and not placed yet, by name
        self._read_chunks = [
            loading.chunk.with_blocks(blocks, loading.chunk.kv_dtype)
            for loading, blocks in zip(chunks, self._blocks, strict=True)
        ]
        self._angles: AngleTables = {}
        self._stopped = False

    @property
    def starts(self) -> list[int]:
        """Positions of the chunks."""
        return [loading.start for loading in self._chunks]

    @property
    def joins_layers(self) -> bool:
        """Whether one launch may place several layers.

        Without a placement kernel no launch is saved, and keys are best placed just before they are used. Low-rank
        blocks grow to full size when they are placed, and there is memory for a single layer of those.
        """
        low_rank = any(loading.chunk.kv_dtype in RANKS for loading in self._chunks)
        return self._transfer is not None and not low_rank

    def read(self, layers: range) -> SentLayers:
        """Read the blocks of some layers and start to send them; the reading thread calls it.

        Raises:
            LateMissError: if a block cannot be read.
        """
        read: list[tuple[dict[str, Tensor], str, Tensor]] = []
        for loading, blocks in zip(self._chunks, self._blocks, strict=True):
            if self._stopped:
                break
            try:
                names = (name for layer in layers for name in loading.chunk.layer_names(layer))
                read += [(blocks, name, loading.chunk.blocks[name]) for name in names]
            except Exception as error:  # a pass may be waiting, whatever the error is
                corrupt = isinstance(error, CorruptEntry)
                miss = Miss(str(error) if corrupt else f"cannot be read: {error}")
                raise LateMissError({loading.start: miss}, [loading.start] if corrupt else []) from error
        sent = None if self._transfer is None else self._transfer.send([tensor for _, _, tensor in read])
        tensors = [tensor for _, _, tensor in read] if sent is None else sent.tensors
        for (blocks, name, _), tensor in zip(read, tensors, strict=True):
            blocks[name] = tensor
        return layers, sent

    def place(self, sent: Sequence[SentLayers]) -> int:
        """Place layers that have been read, and return their bytes; the computing thread calls it.

        Raises:
            LateMissError: if the blocks do not fit.
        """
        buffer, staged, nbytes = self._buffer, [], 0
        assert buffer is not None
        for layers, transfer in sent:
            if transfer is not None:
                transfer.receive()
            for layer, (loading, chunk) in product(layers, zip(self._chunks, self._read_chunks, strict=True)):
                try:
                    if self._transfer is not None:
                        staged += stage_layer(buffer, loading.start, chunk, layer, rope=self._ropes[layer])
                    else:
                        copy_layer(buffer, loading.start, chunk, layer, rope=self._ropes[layer], tables=self._angles)
                except (RuntimeError, ValueError) as error:  # the blocks do not match the chunk's header
                    raise LateMissError({loading.start: Miss(f"cannot be read: {error}")}) from error
            for blocks, loading in zip(self._blocks, self._chunks, strict=True):
                names = [name for layer in layers for name in loading.chunk.layer_names(layer)]
                nbytes += sum(blocks.pop(name).nbytes for name in names)
        if staged:
            from qcfuse_rag.runtime.kernels.placement import place_blocks

            place_blocks(staged, self._angles)
        return nbytes

    def stop(self) -> None:
        """Drop what would keep memory alive, and read nothing more."""
        self._stopped, self._buffer = True, None
        self._angles.clear()
        for blocks in self._blocks:
            blocks.clear()
