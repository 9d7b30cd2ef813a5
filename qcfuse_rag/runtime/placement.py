"""Place stored chunks in a prompt: copy their keys and values to their positions and rotate the keys there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qcfuse_rag.models.rope import AngleTables, LayerRope, angles_from, rotate, rotate_into
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.quantization import side_block

if TYPE_CHECKING:
    from qcfuse_rag.runtime.kernels.placement import PlacementBlock

ROTATED_AT_ONCE = 1024
"""Tokens: what is held beside the buffer meanwhile stays small, and in the processor's cache."""


@torch.inference_mode()
def copy_chunk(
    buffer: KVBuffer,
    start: int,
    chunk: ChunkKV,
    sequences: slice = slice(None),
    *,
    ropes: Sequence[LayerRope] | None = None,
) -> int:
    """Copy a chunk's unrotated keys and its values to positions `start ...`.

    Args:
        buffer: the request's keys and values.
        start: the position of the chunk's first token.
        chunk: what is stored.
        sequences: those of the buffer that get it.
        ropes: rotation of each layer, to have the keys rotated on their way; they stay unrotated if None.

    Returns:
        Bytes copied.

    Raises:
        CorruptEntry: if a block fails its check; the positions then hold nothing and must be computed as rows.
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
    """Copy one layer of a chunk; see `copy_chunk`.

    Args:
        buffer: the request's keys and values.
        start: the position of the chunk's first token.
        chunk: what is stored.
        layer: which.
        sequences: those of the buffer that get it.
        rope: rotation of the layer; keys stay unrotated if None.
        tables: cosines and sines that were computed before; added to.

    Returns:
        Bytes copied.

    Raises:
        ValueError: if a block does not fit the buffer.
    """
    stop = start + chunk.n_tokens
    keys, values = chunk.layer(layer)
    into, into_values = (side[layer][sequences, :, start:stop] for side in (buffer.keys, buffer.values))
    if keys.shape != into.shape[1:] or values.shape != into_values.shape[1:]:  # torch would repeat a lone head
        raise ValueError(f"blocks {tuple(keys.shape)} and {tuple(values.shape)} do not go into {tuple(into.shape)}")
    if rope is None or rope.inv_freq is None:
        into.copy_(keys, non_blocking=True)
    else:
        cos, sin = angles_from({} if tables is None else tables, rope, start, stop, into.device)
        rotate_into(into, keys.to(into.device, non_blocking=True), cos, sin, interleaved=rope.interleaved)
    into_values.copy_(values, non_blocking=True)
    return keys.nbytes + values.nbytes


@torch.inference_mode()
def stage_chunk(buffer: KVBuffer, start: int, chunk: ChunkKV, ropes: Sequence[LayerRope]) -> list[PlacementBlock]:
    """Bring a chunk to the buffer's device as it is stored, for `kernels.place.place_blocks` to put it in its place.

    Args:
        buffer: the request's keys and values, of one sequence.
        start: the position of the chunk's first token.
        chunk: what is stored; one of low rank is multiplied out.
        ropes: rotation of each layer.

    Raises:
        CorruptEntry: if a block fails its check.
        ValueError: if a block does not fit the buffer.
    """
    return [block for layer, rope in enumerate(ropes) for block in stage_layer(buffer, start, chunk, layer, rope=rope)]


def stage_layer(buffer: KVBuffer, start: int, chunk: ChunkKV, layer: int, *, rope: LayerRope) -> list[PlacementBlock]:
    """Bring one layer of a chunk to the buffer's device, its keys and its values; see `stage_chunk`.

    Called within `torch.inference_mode`, for every chunk and layer: entering it takes longer than what is done here.
    """
    from qcfuse_rag.runtime.kernels.placement import PlacementBlock

    beside, staged = side_block(chunk.numbers), []
    for kind, into in (("key", buffer.keys[layer]), ("value", buffer.values[layer])):
        name, device = f"{kind}.{layer}", into.device
        block = chunk.part(kind, layer).transpose(0, 1).contiguous() if beside == "basis" else chunk.blocks[name]
        scale = chunk.blocks[f"{name}.scale"].to(device, non_blocking=True) if beside == "scale" else None
        stored = block if block.device == device else block.to(device, non_blocking=True)
        staged.append(PlacementBlock(stored, scale, into, start, rope if kind == "key" else None))
    return staged


@torch.inference_mode()
def rotate_buffer(buffer: KVBuffer, ropes: Sequence[LayerRope], start: int, stop: int, *, back: bool = False) -> None:
    """Rotate the keys at positions `start <= p < stop` in place, each by its own position.

    Positions that hold nothing yet may be inside the range: they stay without meaning.

    Args:
        buffer: the request's keys.
        ropes: rotation of each layer.
        start: first position.
        stop: position after the last.
        back: rotate backwards, from prompt positions to the unrotated form that is stored.
    """
    tables: AngleTables = {}
    for keys, rope in zip(buffer.keys, ropes, strict=True):
        if rope.inv_freq is None:
            continue
        table = angles_from(tables, rope, start, stop, keys.device)
        for first in range(start, stop, ROTATED_AT_ONCE):
            last = min(first + ROTATED_AT_ONCE, stop)
            part, (cos, sin) = keys[:, :, first:last], (one[first - start : last - start] for one in table)
            part.copy_(rotate(part, cos, -sin if back else sin, interleaved=rope.interleaved))
