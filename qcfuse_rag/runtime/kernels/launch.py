"""Code that all launchers share: device properties, tile sizes and a check of operands."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4
    gdc_launch_dependents = gdc_wait = None

DEPENDENT_SINCE = (9, 0)
"""First compute capability with programmatic dependent launch."""
DEPENDENT_DRIVER = 12030
"""First driver, by its CUDA version, that records such launches in CUDA graphs."""


@cache
def concurrent_programs(device: torch.device) -> int:
    """Return how many programs of four warps a device runs at once: two per multiprocessor; 1 without a GPU."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def holds_large_tile(device: torch.device) -> bool:
    """Return whether `LARGE_TILE` fits a device: an NVIDIA GPU for data centres since Hopper, such as H100 and B200."""
    if device.type != "cuda" or torch.version.hip is not None:  # AMD counts its capabilities otherwise
        return False
    return torch.cuda.get_device_capability(device)[0] in LARGE_TILE_CAPABILITIES


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return the launch options by which a device starts a kernel's programs before the kernel before it has ended.

    This is CUDA's programmatic dependent launch, of NVIDIA GPUs since Hopper. It saves the microseconds between two
    kernels, in which the device idles. Every program of a kernel that is launched with these options must wait, as
    `wait_for_inputs` does, before it writes, and before it reads anything but weights.
    """
    is_compiled = isinstance(wait_for_inputs, triton.JITFunction)  # not interpreted
    if device.type != "cuda" or torch.version.hip is not None or gdc_wait is None or not is_compiled:
        return {"DEPENDENT": False}
    driver: int = getattr(torch._C, "_cuda_getDriverVersion", lambda: DEPENDENT_DRIVER)()
    if torch.cuda.get_device_capability(device) < DEPENDENT_SINCE or driver < DEPENDENT_DRIVER:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Let the programs of the next kernel start once all programs of this kernel have."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Let the next kernel start, and wait until all earlier kernels have ended and their results can be read.

    Before this call, a program may read weights: no kernel of the pass writes them.
    """
    let_next_start(DEPENDENT)  # a second call has no effect
    if DEPENDENT:
        gdc_wait()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch kernels on a device: Triton uses the thread's current device, not that of the operands."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton dtype of a torch dtype of keys and values."""
    return {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.int8: tl.int8,
    }[dtype]


def block_dim(dim: int) -> int:
    """Return the smallest power of two that holds a head's channels, at least 16 for the matrix units."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Tile:
    """The block size of one program of the attention and score kernels.

    Attributes:
        rows: (row, query head) pairs of a program.
        keys: keys of one loop iteration.
        warps: warps of 32 threads of a program.
        stages: loop iterations whose keys are loaded at once, including the one being computed.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2


LARGE_TILE_CAPABILITIES = (9, 10)
"""Major compute capabilities with 227 KiB of shared memory a program."""
LARGE_TILE = Tile(128, 128, warps=8)
"""The tile for enough rows to fill such a GPU, chosen by calculation: at their 989 TFLOP/s an H100's multiprocessors
would read 15 TB/s of keys and values with 64 rows, and half of that with 128. Twice the keys per iteration halve the
overhead per iteration. It uses most of a multiprocessor's shared memory."""


def default_tile(dtype: torch.dtype, dim: int, pairs: int) -> Tile:
    """Return the tile for a number of (row, query head) pairs and channels.

    There are two tiles, for few and for many pairs, so that a question of another length compiles no third kernel.
    Float32 is multiplied in registers, which hold few rows and keys at a time.
    """
    is_float32 = dtype == torch.float32
    rows = 16 if is_float32 or pairs <= 16 else 64
    warps = 8 if dim > 128 and rows > 16 else 4  # with 4, a thread spills up to 300 bytes on Ampere
    return Tile(rows, (64 if dim <= 128 else 32) // (2 if is_float32 else 1), warps)


def large_tile_fits(dtype: torch.dtype, dim: int) -> bool:
    """Return whether `LARGE_TILE` fits a multiprocessor for a dtype and channels per head."""
    return dtype != torch.float32 and dim <= 128


def min_rows_for_large_tile(kv_heads: int, device: torch.device) -> int:
    """Return the fewest (row, query head) pairs of a key head for which `LARGE_TILE` fills a device.

    Programs with few keys balance those with many only if there are more programs than multiprocessors.
    """
    blocks = -(-3 * concurrent_programs(device) // (4 * kv_heads))
    return (blocks - 1) * LARGE_TILE.rows + 1


def check_operands(dtype: torch.dtype, *operands: Tensor) -> None:
    """Raise `ValueError` unless all have a dtype, and channels that lie side by side."""
    for operand in operands:
        if operand.dtype != dtype or operand.stride(-1) != 1:
            found = f"{operand.dtype} of strides {operand.stride()}"
            raise ValueError(f"operands must be {dtype} with channels side by side, got {found}")
