"""Load chunks that lie in one allocation each, in page-locked memory or on the device.

A prompt has thousands of blocks. Taking each as a tensor keeps the host busy for longer than the link needs for the
bytes: on an H200, 1.5 GB in 1,440 blocks were sent in 70 ms instead of 28 (2026-11-26). So one copy sends several
layers of a chunk, and the addresses of their blocks are computed for all chunks and layers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qcfuse_rag.models.rope import AngleTables, LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.loading.host_to_device import HostToDevice
from qcfuse_rag.runtime.loading.sources import LoadingChunk, SentLayers
from qcfuse_rag.store.chunk import KINDS, BlockForm, SlabBlocks, SlabLayout

Forms = tuple[tuple[BlockForm, BlockForm], ...]
"""Of each layer's keys and values."""


class SlabSource:
    """Chunks of one format, each in an allocation of its own; see `slabs_by_format` and `sources.BlockSource`."""

    joins_layers = True

    def __init__(
        self, buffer: KVBuffer, ropes: Sequence[LayerRope], chunks: Sequence[LoadingChunk], transfer: HostToDevice
    ) -> None:
        self._buffer: KVBuffer | None = buffer
        self._ropes, self._transfer = ropes, transfer
        slabs = [_slab(loading) for loading in chunks]
        self.starts = [loading.start for loading in chunks]
        self._memories: list[Tensor] = [memory for memory, _ in slabs]
        self._layouts: list[SlabLayout] = [layout for _, layout in slabs]
        self._forms = self._layouts[0].forms
        self._entries = self._all_entries(buffer, chunks)
        self.needs_thread = self._memories[0].device != transfer.device
        self._bases: dict[int, NDArray[np.int64]] = {}  # of each chunk's allocation, by the first layer that was sent
        self._angles: AngleTables = {}

    def read(self, layers: range) -> SentLayers:
        """Start to send some layers."""
        if not self.needs_thread:
            self._bases[layers.start] = np.array([memory.data_ptr() for memory in self._memories])
            return layers, None
        bounds = [(layout.bounds[layers.start], layout.bounds[layers.stop]) for layout in self._layouts]
        pairs = zip(self._memories, bounds, strict=True)
        handle, addresses = self._transfer.send_spans([memory[start:stop] for memory, (start, stop) in pairs])
        self._bases[layers.start] = np.array(addresses) - [start for start, _ in bounds]
        return layers, handle

    def place(self, sent: Sequence[SentLayers]) -> int:
        """Place layers that have been sent: one launch for all of the same form and rotation."""
        from qcfuse_rag.runtime.kernels.placement import launch_groups, launch_table

        buffer = self._buffer
        assert buffer is not None
        for _, handle in sent:
            if handle is not None:
                handle.receive()
        for memory in self._memories:  # a store may drop a chunk while it is being placed
            if memory.is_cuda:
                memory.record_stream(torch.cuda.current_stream(memory.device))
        for layers, _ in sent:
            addresses = self._entries[layers.start : layers.stop, :, :, :2]
            addresses += np.where(addresses < 0, 1, self._bases.pop(layers.start)[:, None])  # 0 if there are no scales
        placed, sides = [layer for layers, _ in sent for layer in layers], _sides(buffer)
        for blocks in launch_groups(self._layouts_and_rotations(placed, sides)):
            table = np.concatenate([self._entries[layer, kind] for layer, kind in blocks])
            layer, kind = blocks[0]
            rope = self._rotation(layer, kind)
            launch_table(table, self._forms[layer][kind], sides[kind][layer], rope, self._angles)
        return sum(layout.sizes[layer] for layout in self._layouts for layer in placed)

    def stop(self) -> None:
        """Drop what would keep memory alive."""
        self._buffer = None
        self._angles.clear()

    def _all_entries(self, buffer: KVBuffer, chunks: Sequence[LoadingChunk]) -> NDArray[np.int64]:
        """Return the rows of all tables, `[n_layers, 2, n_chunks, 6]`, with offsets instead of addresses to read."""
        entries = np.empty((len(self._ropes), len(KINDS), len(chunks), 6), np.int64)
        entries[..., :2] = np.stack([layout.offsets for layout in self._layouts], axis=2)
        for kind, side in enumerate(_sides(buffer)):
            entries[:, kind, :, 2] = [[layer.data_ptr()] for layer in side]
        entries[..., 3:5] = [[loading.start, loading.chunk.n_tokens] for loading in chunks]
        entries[..., 5] = 0
        entries[:, 0, :, 5] = [[rope.inv_freq is not None] for rope in self._ropes]
        return entries

    def _layouts_and_rotations(
        self, layers: Sequence[int], sides: tuple[tuple[Tensor, ...], ...]
    ) -> Iterator[tuple[object, object, tuple[int, int]]]:
        for layer, (kind, side) in product(layers, enumerate(sides)):
            rope = self._rotation(layer, kind)
            rotation = None if rope is None else (id(rope.inv_freq), rope.interleaved)
            yield (self._forms[layer][kind], side[layer].stride()), rotation, (layer, kind)

    def _rotation(self, layer: int, kind: int) -> LayerRope | None:
        rope = self._ropes[layer]
        return None if kind > 0 or rope.inv_freq is None else rope


def slabs_by_format(
    chunks: Sequence[LoadingChunk], buffer: KVBuffer, transfer: HostToDevice
) -> tuple[list[list[LoadingChunk]], list[LoadingChunk]]:
    """Split chunks into those that a `SlabSource` loads, by format and device, and the others."""
    groups: dict[tuple[torch.device, Forms], list[LoadingChunk]] = {}
    others: list[LoadingChunk] = []
    for loading in chunks:
        blocks = loading.chunk.blocks
        if (
            isinstance(blocks, SlabBlocks)
            and blocks.layout is not None
            and (blocks.memory.device == transfer.device or blocks.memory.is_pinned())
            and blocks.layout.n_tokens == loading.chunk.n_tokens <= buffer.capacity - loading.start
        ):
            groups.setdefault((blocks.memory.device, blocks.layout.forms), []).append(loading)
        else:
            others.append(loading)
    fitting: list[list[LoadingChunk]] = []
    for (_, forms), group in groups.items():
        if _fits(forms, buffer):
            fitting.append(group)
        else:
            others += group
    return fitting, others


def _slab(loading: LoadingChunk) -> tuple[Tensor, SlabLayout]:
    blocks = loading.chunk.blocks
    assert isinstance(blocks, SlabBlocks)
    assert blocks.layout is not None
    return blocks.memory, blocks.layout


def _sides(buffer: KVBuffer) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return buffer.keys, buffer.values


def _fits(forms: Forms, buffer: KVBuffer) -> bool:
    expected = [
        (layer.shape[0], *layer.shape[1::2]) for layers in zip(*_sides(buffer), strict=True) for layer in layers
    ]
    return expected == [(1, form.heads, form.dim) for pair in forms for form in pair]
