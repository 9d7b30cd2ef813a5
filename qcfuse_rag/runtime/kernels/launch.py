"""What every launcher needs: how much a device runs at once, and whether operands are laid out as said."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from qcfuse_rag.runtime.kernels.limits import DTYPES, MAX_DIM


@cache
def processors(device: torch.device) -> int:
    """Return how many programs of four warps a device runs at once, two a multiprocessor; 1 without a GPU."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a GPU of compute capability 9, such as an H100."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Have launches go to a device, which Triton takes for the thread's current one, whatever the operands'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Return how Triton calls a dtype of keys and values."""
    return {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.int8: tl.int8,
        torch.float8_e4m3fn: tl.float8e4nv,
    }[dtype]


def block_dim(dim: int) -> int:
    """Return the power of two that holds a head's channels; the matrix units take 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of the kernels that score has in hand at a time.

    Attributes:
        rows: (row, query head) pairs.
        keys: looked at in one turn of its loop.
        warps: of 32 threads, that share the work.
        stages: turns whose keys are on their way at once, the one that is computed included.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2


TALL = Tile(128, 128, warps=8)
"""Of rows enough to fill a Hopper GPU, by calculation: for 64 rows an H100's multiprocessors, multiplying at their 989
TFLOP/s, would take in 15 TB/s of keys and values, for 128 half of that. Twice the keys at a time halve what is done for
each turn of the loop. It takes most of a multiprocessor's shared memory."""


def tile_of(dtype: torch.dtype, dim: int, pairs: int) -> Tile:
    """Return what a program takes of so many (row, query head) pairs with so many channels.

    Few or many: kernels are compiled for either, and no third time for a question of another length. Float32 is
    multiplied in registers, which hold few rows and keys at a time.
    """
    wide = dtype == torch.float32
    rows = 16 if wide or pairs <= 16 else 64
    return Tile(rows, (64 if dim <= 128 else 32) // (2 if wide else 1))


def tall_fits(dtype: torch.dtype, dim: int) -> bool:
    """Return whether a multiprocessor has room for `TALL` of a dtype with so many channels a head."""
    return dtype != torch.float32 and dim <= 128


def fewest_tall(kv_heads: int, device: torch.device) -> int:
    """Return how many (row, query head) pairs of a key head are enough for `TALL` to fill a device.

    Programs of few keys make up for those of many only if there are more of them than multiprocessors.
    """
    blocks = -(-3 * processors(device) // (4 * kv_heads))
    return (blocks - 1) * TALL.rows + 1


def check_operands(query: Tensor, key: Tensor, value: Tensor | None, rows: Tensor) -> None:
    """Check queries, keys, values and rows against each other.

    Raises:
        ValueError: naming the operand that does not fit.
    """
    for name, one in (("query", query), ("key", key), ("value", value)):
        if one is None:
            continue
        if one.dim() != 4 or one.shape[0] != 1:
            raise ValueError(f"{name} must be [1, heads, tokens, channels], got {tuple(one.shape)}")
        if one.dtype not in DTYPES or one.dtype != query.dtype:
            raise ValueError(f"{name} must be of one dtype of {', '.join(map(str, DTYPES))}, got {one.dtype}")
        if one.stride(3) != 1:
            raise ValueError(f"{name}'s channels must lie side by side, got strides {one.stride()}")
        if not 0 < one.shape[3] <= MAX_DIM:
            raise ValueError(f"{name} must have at most {MAX_DIM} channels a head, got {one.shape[3]}")
        if one.device != query.device:
            raise ValueError(f"{name} is on {one.device}, query on {query.device}")
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} does not fit key {tuple(key.shape)}")
    if value is not None and value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value {tuple(value.shape)} does not fit key {tuple(key.shape)}")
    if rows.dtype != torch.int64 or rows.shape != (query.shape[2],) or not rows.is_contiguous():
        raise ValueError(f"rows must be [{query.shape[2]}] int64, got {tuple(rows.shape)} {rows.dtype}")
    if rows.device != query.device:
        raise ValueError(f"rows are on {rows.device}, query on {query.device}")


def check_extras(query: Tensor, scaling: float, window: int | None, sinks: Tensor | None) -> None:
    """Check what models attend with besides.

    Raises:
        ValueError: naming what does not fit.
    """
    if scaling <= 0:
        raise ValueError(f"scaling must be more than 0, got {scaling}")
    if sinks is not None and (sinks.shape != query.shape[1:2] or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be [{query.shape[1]}], got {tuple(sinks.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
