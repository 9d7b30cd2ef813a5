"""Place stored chunks: dequantize them, rotate their keys, and scatter them into a request's buffer.

One launch places all chunks and layers of one format. A table in device memory holds for every block the addresses of
its numbers, its scales and its destination. Each stored byte is read once and each placed byte written once, which is
the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from qcfuse_rag.models.rope import AngleTables, LayerRope, angles_from
from qcfuse_rag.runtime.kernels.launch import block_dim, on_device, triton_type
from qcfuse_rag.store.chunk import BlockForm
from qcfuse_rag.store.quantization import dequantize

T = TypeVar("T")

TOKENS_PER_PROGRAM = 16
MAX_BLOCKS_PER_LAUNCH = (64 << 10) // (6 * 8)
"""CUDA copies up to 64 KiB of ordinary memory without waiting for earlier launches."""


@dataclass(slots=True, eq=False)
class PlacementBlock:
    """Keys or values of one chunk in one layer on the device, with their destination.

    A prompt has about a thousand, created while the device waits for them, so the checks are few.

    Attributes:
        stored: `[n, H, D]` in the stored dtype: any float dtype, or int8 with `scale`; contiguous.
        scale: `[1, H, D]` or `[n, H, 1]` float32, or None; contiguous.
        into: `[1, H, capacity, D]`, a layer of a request's buffer.
        start: position of the first token.
        rope: rotation of keys; None for values.

    Raises:
        ValueError: if shapes do not match or tensors are not contiguous.
    """

    stored: Tensor
    scale: Tensor | None
    into: Tensor
    start: int
    rope: LayerRope | None = None

    @property
    def rotation(self) -> LayerRope | None:
        """The rotation, or None if no channel rotates."""
        return None if self.rope is None or self.rope.inv_freq is None else self.rope

    def __post_init__(self) -> None:
        tokens, heads, dim = self.stored.shape
        requests, into_heads, capacity, into_dim = self.into.shape
        if (requests, into_heads, into_dim) != (1, heads, dim) or self.into.stride(3) != 1:
            raise ValueError(f"a block {tuple(self.stored.shape)} does not go into {tuple(self.into.shape)}")
        if not 0 <= self.start <= capacity - tokens:
            raise ValueError(f"{tokens} tokens at {self.start} exceed a buffer of {capacity}")
        if self.scale is not None and self.scale.shape not in ((1, heads, dim), (tokens, heads, 1)):
            raise ValueError(f"scales {tuple(self.scale.shape)} do not fit {tuple(self.stored.shape)}")
        if not self.stored.is_contiguous() or (self.scale is not None and not self.scale.is_contiguous()):
            raise ValueError("blocks and scales must be contiguous")


@triton.jit
def place(
    table,
    cosines,
    sines,
    heads,
    head_stride,
    token_stride,
    STORED: tl.constexpr,
    PLACED: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Place some tokens of one head of one block. `HALF` pairs of channels rotate, the channels after them do not.

    Blocks of values in the same launch do not rotate either: their cosines are 1 and their sines 0.
    """
    head, item = tl.program_id(1), tl.program_id(2)
    row = table + item * 6
    stored = tl.load(row).to(tl.pointer_type(STORED))
    scales = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    into = tl.load(row + 2).to(tl.pointer_type(PLACED))
    if ALIGNED:  # a pointer loaded from a table has no known alignment, and narrow accesses are slow
        stored, into = tl.multiple_of(stored, 16), tl.multiple_of(into, 16)
    start, tokens, rotation = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    active = token < tokens
    source = (token.to(tl.int64) * heads + head) * DIM
    target = head.to(tl.int64) * head_stride + (start + token) * token_stride
    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF)
        mask = active[:, None] & (pair < HALF)[None, :]
        channel = 2 * pair if INTERLEAVED else pair
        partner = channel + 1 if INTERLEAVED else channel + HALF
        first = tl.load(stored + source[:, None] + channel[None, :], mask=mask).to(tl.float32)
        second = tl.load(stored + source[:, None] + partner[None, :], mask=mask).to(tl.float32)
        if SCALED:
            first *= tl.load(scales + head * DIM + channel, mask=pair < HALF, other=0.0)[None, :]
            second *= tl.load(scales + head * DIM + partner, mask=pair < HALF, other=0.0)[None, :]
            first, second = first.to(PLACED).to(tl.float32), second.to(PLACED).to(tl.float32)
        angle = (start + token)[:, None] * HALF + pair[None, :]
        rotated = active[:, None] & (pair < HALF * rotation)[None, :]
        cos = tl.load(cosines + angle, mask=rotated, other=1.0)
        sin = tl.load(sines + angle, mask=rotated, other=0.0)
        tl.store(into + target[:, None] + channel[None, :], (first * cos - second * sin).to(PLACED), mask=mask)
        tl.store(into + target[:, None] + partner[None, :], (second * cos + first * sin).to(PLACED), mask=mask)
    if 2 * HALF < DIM:
        dim = tl.arange(0, BLOCK_DIM)
        rest_mask = active[:, None] & ((dim >= 2 * HALF) & (dim < DIM))[None, :]
        rest = tl.load(stored + source[:, None] + dim[None, :], mask=rest_mask).to(tl.float32)
        if SCALED:
            if BY_TOKEN:
                rest *= tl.load(scales + token.to(tl.int64) * heads + head, mask=active, other=0.0)[:, None]
            else:
                rest *= tl.load(scales + head * DIM + dim, mask=dim < DIM, other=0.0)[None, :]
        tl.store(into + target[:, None] + dim[None, :], rest.to(PLACED), mask=rest_mask)


def place_blocks(blocks: Sequence[PlacementBlock], tables: AngleTables | None = None) -> None:
    """Place blocks of one device: one launch for all of the same format, shape and rotation.

    Blocks without rotation join them. `tables` keeps cosines and sines at every position of a buffer between calls.
    """
    tables = {} if tables is None else tables
    for group in launch_groups(map(_layout_and_rotation, blocks)):
        _launch(group, tables)


def launch_groups(blocks: Iterable[tuple[object, object, T]]) -> Iterator[list[T]]:
    """Yield what one launch places: blocks of the same layout and rotation, behind them those that do not rotate."""
    by_layout: dict[object, dict[object, list[T]]] = {}
    for layout, rotation, block in blocks:
        by_layout.setdefault(layout, {}).setdefault(rotation, []).append(block)
    for groups in by_layout.values():
        unrotated = groups.pop(None, [])
        if groups:
            next(iter(groups.values())).extend(unrotated)
            yield from groups.values()
        else:
            yield unrotated


def _layout_and_rotation(block: PlacementBlock) -> tuple[object, object, PlacementBlock]:
    rope, scale = block.rotation, block.scale
    layout = (
        block.stored.dtype,
        block.stored.shape[1:],
        block.into.dtype,
        block.into.stride(),
        None if scale is None else scale.shape[2] == 1,
    )
    return layout, None if rope is None else (id(rope.inv_freq), rope.interleaved), block


def _launch(group: list[PlacementBlock], tables: AngleTables) -> None:
    sample = group[0]
    entries = [
        (
            block.stored.data_ptr(),
            0 if block.scale is None else block.scale.data_ptr(),
            block.into.data_ptr(),
            block.start,
            block.stored.shape[0],
            block.rotation is not None,
        )
        for block in group
    ]
    scaled, by_token = sample.scale is not None, sample.scale is not None and sample.scale.shape[2] == 1
    _, heads, dim = sample.stored.shape
    form = BlockForm(sample.stored.dtype, heads, dim, scaled, by_token)
    launch_table(np.array(entries, np.int64), form, sample.into, sample.rotation, tables)


def launch_table(
    entries: NDArray[np.int64], form: BlockForm, into: Tensor, rope: LayerRope | None, tables: AngleTables
) -> None:
    """Place the blocks of a table.

    Args:
        entries: `[n, 6]`: addresses of a block's numbers, its scales and the layer of the buffer that it goes into; the
            position of its first token, its tokens, and whether it rotates.
        form: of all blocks.
        into: `[1, H, capacity, D]`, one of the layers; the others have its dtype and strides.
        rope: the rotation of those that rotate; None if none does.
        tables: cosines and sines from earlier calls; see `place_blocks`.
    """
    device = into.device
    for first in range(0, len(entries), MAX_BLOCKS_PER_LAUNCH):
        part = entries[first : first + MAX_BLOCKS_PER_LAUNCH]
        table = torch.from_numpy(np.ascontiguousarray(part)).to(device, non_blocking=True)
        half, interleaved, cos, sin = 0, False, table, table
        if rope is not None and rope.inv_freq is not None:
            half, interleaved = len(rope.inv_freq), rope.interleaved
            cos, sin = angles_from(tables, rope, 0, into.shape[2], device)
        with on_device(device):
            place[(triton.cdiv(int(part[:, 4].max()), TOKENS_PER_PROGRAM), form.heads, len(part))](
                table,
                cos,
                sin,
                form.heads,
                into.stride(1),
                into.stride(2),
                STORED=triton_type(form.dtype),
                PLACED=triton_type(into.dtype),
                DIM=form.dim,
                HALF=half,
                BLOCK_DIM=block_dim(form.dim),
                BLOCK_HALF=block_dim(max(1, half)),
                BLOCK_TOKENS=TOKENS_PER_PROGRAM,
                ALIGNED=not (part[:, (0, 2)] % 16).any(),
                SCALED=form.scaled,
                BY_TOKEN=form.by_token,
                INTERLEAVED=interleaved,
            )


def place_blocks_reference(blocks: Sequence[PlacementBlock]) -> None:
    """Compute what `place_blocks` does, block by block in torch."""
    for block in blocks:
        dequantized = block.stored if block.scale is None else dequantize(block.stored, block.scale, block.into.dtype)
        tokens = dequantized.transpose(0, 1)
        stop = block.start + tokens.shape[1]
        if block.rope is not None:
            tokens = block.rope.rotated(tokens, torch.arange(block.start, stop, device=tokens.device))
        block.into[0, :, block.start : stop] = tokens
