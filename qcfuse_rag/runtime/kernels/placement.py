"""Place stored chunks: undo their narrow format, rotate their keys, and scatter them into a request's buffer.

One launch moves all chunks and layers of one format: a table in device memory says for every block where it lies, where
its scales lie, and where it goes. A stored block is read once and a place written once, which is the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.models.rope import AngleTables, LayerRope, angles, angles_from, rotate
from qcfuse_rag.runtime.kernels.launch import on_device
from qcfuse_rag.runtime.kernels.launch import block_dim, triton_type
from qcfuse_rag.store.quantization import dequantize

TOKENS_PER_PROGRAM = 16
MAX_BLOCKS_PER_LAUNCH = 32768
"""Blocks; CUDA counts to 65,535 in a grid's third dimension."""


@dataclass(slots=True, eq=False)
class PlacementBlock:
    """Keys or values of one chunk in one layer, on the device, and the place they go to.

    There are a thousand in a prompt, made while a device waits for them: what is checked is checked in few steps.

    Attributes:
        stored: `[n, H, D]`, as stored: any float dtype, or int8 or fp8 with `scale`; contiguous.
        scale: `[1, H, D]` or `[n, H, 1]` float32, or None; contiguous.
        into: `[1, H, capacity, D]`, a layer of a request's buffer.
        start: position of the first token.
        rope: how to rotate; None for values.

    Raises:
        ValueError: if the parts do not fit each other.
    """

    stored: Tensor
    scale: Tensor | None
    into: Tensor
    start: int
    rope: LayerRope | None = None

    @property
    def turning(self) -> LayerRope | None:
        """How to rotate, if any channel does."""
        return None if self.rope is None or self.rope.inv_freq is None else self.rope

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.stored.nbytes + (0 if self.scale is None else self.scale.nbytes)

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
        if self.scale is not None and self.scale.shape[2] == 1 and self.rope is not None:
            raise ValueError("keys are scaled by channel, not by token")


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
    """Some tokens of one head of one block. `HALF` pairs of channels rotate, the channels after them do not.

    Nor do values among the blocks, whose cosines are 1 and sines 0: they go by the same launch.
    """
    head, item = tl.program_id(1), tl.program_id(2)
    row = table + item * 6
    stored = tl.load(row).to(tl.pointer_type(STORED))
    scales = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    into = tl.load(row + 2).to(tl.pointer_type(PLACED))
    if ALIGNED:  # which a pointer out of a table does not say by itself, and narrow accesses are slow
        stored, into = tl.multiple_of(stored, 16), tl.multiple_of(into, 16)
    start, tokens, turning = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    real = token < tokens
    at = (token.to(tl.int64) * heads + head) * DIM
    to = head.to(tl.int64) * head_stride + (start + token) * token_stride
    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF)
        inside = real[:, None] & (pair < HALF)[None, :]
        one = 2 * pair if INTERLEAVED else pair
        other = one + 1 if INTERLEAVED else one + HALF
        first = tl.load(stored + at[:, None] + one[None, :], mask=inside).to(tl.float32)
        second = tl.load(stored + at[:, None] + other[None, :], mask=inside).to(tl.float32)
        if SCALED:
            first *= tl.load(scales + head * DIM + one, mask=pair < HALF, other=0.0)[None, :]
            second *= tl.load(scales + head * DIM + other, mask=pair < HALF, other=0.0)[None, :]
            first, second = first.to(PLACED).to(tl.float32), second.to(PLACED).to(tl.float32)
        angle = (start + token)[:, None] * HALF + pair[None, :]
        turned = real[:, None] & (pair < HALF * turning)[None, :]
        cos = tl.load(cosines + angle, mask=turned, other=1.0)
        sin = tl.load(sines + angle, mask=turned, other=0.0)
        tl.store(into + to[:, None] + one[None, :], (first * cos - second * sin).to(PLACED), mask=inside)
        tl.store(into + to[:, None] + other[None, :], (second * cos + first * sin).to(PLACED), mask=inside)
    if 2 * HALF < DIM:
        dim = tl.arange(0, BLOCK_DIM)
        kept = real[:, None] & ((dim >= 2 * HALF) & (dim < DIM))[None, :]
        rest = tl.load(stored + at[:, None] + dim[None, :], mask=kept).to(tl.float32)
        if SCALED:
            if BY_TOKEN:
                rest *= tl.load(scales + token.to(tl.int64) * heads + head, mask=real, other=0.0)[:, None]
            else:
                rest *= tl.load(scales + head * DIM + dim, mask=dim < DIM, other=0.0)[None, :]
        tl.store(into + to[:, None] + dim[None, :], rest.to(PLACED), mask=kept)


def place_blocks(blocks: Sequence[PlacementBlock], tables: AngleTables | None = None) -> None:
    """Place blocks, in one launch for all that have the same format, shape and rotation, and for those that have none.

    Args:
        blocks: on one device; those that are placed at the same positions of the same buffer overwrite each other in
            no order.
        tables: cosines and sines at every position of a buffer, from calls before; added to.
    """
    tables = {} if tables is None else tables
    alike: dict[tuple[object, ...], dict[object, list[PlacementBlock]]] = {}
    for block in blocks:
        rope, scale = block.turning, block.scale
        about = (
            block.stored.dtype,
            block.stored.shape[1:],
            block.into.dtype,
            block.into.stride(),
            None if scale is None else scale.shape[2] == 1,
        )
        turned = None if rope is None else (id(rope.inv_freq), rope.interleaved)
        alike.setdefault(about, {}).setdefault(turned, []).append(block)
    for groups in alike.values():
        still = groups.pop(None, [])
        if groups:
            next(iter(groups.values())).extend(still)
        for group in groups.values() if groups else [still]:
            for first in range(0, len(group), MAX_BLOCKS_PER_LAUNCH):
                _launch(group[first : first + MAX_BLOCKS_PER_LAUNCH], tables)


def _launch(group: list[PlacementBlock], tables: AngleTables) -> None:
    some = next((one for one in group if one.turning is not None), group[0])
    device = some.into.device
    heads, dim = some.stored.shape[1:]
    rows = [
        (
            one.stored.data_ptr(),
            0 if one.scale is None else one.scale.data_ptr(),
            one.into.data_ptr(),
            one.start,
            one.stored.shape[0],
            one.turning is not None,
        )
        for one in group
    ]
    # Without saying so the host would wait for all that was launched before. CUDA takes up to 64 KiB at once.
    table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    half, interleaved, cos = 0, False, table
    sin = cos
    rope = some.turning
    if rope is not None and rope.inv_freq is not None:
        half, interleaved = len(rope.inv_freq), rope.interleaved
        cos, sin = angles_from(tables, rope, 0, some.into.shape[2], device)
    by_token = some.scale is not None and some.scale.shape[2] == 1
    longest = max(row[4] for row in rows)
    with on_device(device):
        place[(triton.cdiv(longest, TOKENS_PER_PROGRAM), heads, len(group))](
            table,
            cos,
            sin,
            heads,
            some.into.stride(1),
            some.into.stride(2),
            STORED=triton_type(some.stored.dtype),
            PLACED=triton_type(some.into.dtype),
            DIM=dim,
            HALF=half,
            BLOCK_DIM=block_dim(dim),
            BLOCK_HALF=block_dim(max(1, half)),
            BLOCK_TOKENS=TOKENS_PER_PROGRAM,
            ALIGNED=all(pointer % 16 == 0 for row in rows for pointer in (row[0], row[2])),
            SCALED=some.scale is not None,
            BY_TOKEN=by_token,
            INTERLEAVED=interleaved,
        )


def place_blocks_reference(blocks: Sequence[PlacementBlock]) -> None:
    """Do what `place_blocks` does, block by block in torch."""
    for block in blocks:
        wide = block.stored if block.scale is None else dequantize(block.stored, block.scale, block.into.dtype)
        tokens = wide.transpose(0, 1)
        stop = block.start + tokens.shape[1]
        if block.rope is not None and block.rope.inv_freq is not None:
            positions = torch.arange(block.start, stop, device=tokens.device)
            table = angles(block.rope.inv_freq.to(tokens.device), positions)
            tokens = rotate(tokens, *table, interleaved=block.rope.interleaved)
        block.into[0, :, block.start : stop] = tokens
