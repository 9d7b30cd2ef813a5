"""Place stored chunks in a prompt: copy their keys and values to their positions and rotate the keys there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qcfuse_rag.models.rope import AngleTables, LayerRope, angles_from, rotate, rotate_into
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.device import copy_into, to_device
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.quantization import side_block

if TYPE_CHECKING:
    from qcfuse_rag.runtime.kernels.placement import PlacementBlock

TOKENS_PER_STEP = 1024
"""Tokens rotated at a time, so that temporary memory stays small and in the processor's cache."""


@torch.inference_mode()
def copy_chunk(
    buffer: KVBuffer,
    start: int,
    chunk: ChunkKV,
    sequences: slice = slice(None),
    *,
    ropes: Sequence[LayerRope] | None = None,
) -> int:
    """Copy a chunk to the positions from `start` on, in some of the buffer's sequences; return the bytes.

    Keys are rotated to their positions unless `ropes` is None.

    Raises:
        CorruptEntry: if a block fails its check; the positions are then undefined and must be computed as rows.
    """
    tables: AngleTables = {}
    return sum(
        copy_layer(buffer, start, chunk, layer, sequences, rope=None if ropes is None else ropes[layer], tables=tables)
        for layer in range(chunk.n_layers)
    )


@torch.inference_mode()
def copy_layer(
    buffer: KVBuffer,
    start: int,
    chunk: ChunkKV,
    layer: int,
    sequences: slice = slice(None),
    *,
    rope: LayerRope | None = None,
    tables: AngleTables | None = None,
) -> int:
    """Copy one layer of a chunk; see `copy_chunk`. `tables` keeps cosines and sines between layers.

    Raises:
        ValueError: if a block does not fit the buffer.
    """
    stop = start + chunk.n_tokens
    keys, values = chunk.layer(layer)
    key_slots, value_slots = (side[layer][sequences, :, start:stop] for side in (buffer.keys, buffer.values))
    if keys.shape != key_slots.shape[1:] or values.shape != value_slots.shape[1:]:  # torch would broadcast a lone head
        raise ValueError(f"blocks {tuple(keys.shape)} and {tuple(values.shape)} do not fit {tuple(key_slots.shape)}")
    if rope is None or rope.inv_freq is None:
        copy_into(key_slots, keys)
    else:
        cos, sin = angles_from({} if tables is None else tables, rope, start, stop, key_slots.device)
        rotate_into(key_slots, to_device(keys, key_slots.device), cos, sin, interleaved=rope.interleaved)
    copy_into(value_slots, values)
    return keys.nbytes + values.nbytes


def stage_layer(buffer: KVBuffer, start: int, chunk: ChunkKV, layer: int, *, rope: LayerRope) -> list[PlacementBlock]:
    """Copy one layer of a chunk to the buffer's device in its stored format, for `kernels.placement.place_blocks`.

    Low-rank chunks are expanded. The caller enters `torch.inference_mode`, which takes longer than this function.

    Raises:
        CorruptEntry: if a block fails its check.
    """
    from qcfuse_rag.runtime.kernels.placement import PlacementBlock

    side, staged = side_block(chunk.kv_dtype), []
    for kind, target in (("key", buffer.keys[layer]), ("value", buffer.values[layer])):
        name, device = f"{kind}.{layer}", target.device
        block = chunk.part(kind, layer).transpose(0, 1).contiguous() if side == "basis" else chunk.blocks[name]
        scale = chunk.blocks[f"{name}.scale"].to(device, non_blocking=True) if side == "scale" else None
        stored = block if block.device == device else block.to(device, non_blocking=True)
        staged.append(PlacementBlock(stored, scale, target, start, rope if kind == "key" else None))
    return staged


@torch.inference_mode()
def rotate_buffer(buffer: KVBuffer, ropes: Sequence[LayerRope], start: int, stop: int, *, back: bool = False) -> None:
    """Rotate the keys at positions `start <= p < stop` in place, each by its own position, or `back` again.

    The range may include undefined positions; they stay undefined.
    """
    tables: AngleTables = {}
    for keys, rope in zip(buffer.keys, ropes, strict=True):
        if rope.inv_freq is None:
            continue
        table = angles_from(tables, rope, start, stop, keys.device)
        for part_start in range(start, stop, TOKENS_PER_STEP):
            part_stop = min(part_start + TOKENS_PER_STEP, stop)
            part = keys[:, :, part_start:part_stop]
            cos, sin = (angle[part_start - start : part_stop - start] for angle in table)
            part.copy_(rotate(part, cos, -sin if back else sin, interleaved=rope.interleaved))
