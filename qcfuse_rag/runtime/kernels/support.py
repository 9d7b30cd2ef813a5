"""Whether kernels are used on a device: only where each has just been compared with its reference."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from qcfuse_rag.models.rope import KVShape, LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.kernels.limits import DTYPES, FP8_SINCE, MAX_DIM, OLDEST, SWITCH, TOLERANCE, relative_error

ROWS, TOKENS, HEADS, KV_HEADS = 40, 300, 8, 2


def kernels_run_on(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Return whether kernels are used on a device for a dtype and a number of channels of a head."""
    if device.type != "cuda":
        return False
    try:
        return unavailable_reason(device, dtype, dim) is None
    except torch.OutOfMemoryError:
        return False  # for this time; the next may find room to try them


def supports_kernels(query: Tensor, key: Tensor) -> bool:
    """Return whether kernels attend with these queries, keys or values; what they do not take, torch does."""
    return len(query) == 1 and kernels_run_on(query.device, query.dtype, max(query.shape[-1], key.shape[-1]))


def supports_placement(chunk_numbers: str, device: torch.device) -> bool:
    """Return whether the kernel on a device that has some can read a format of numbers."""
    return chunk_numbers != "fp8" or torch.cuda.get_device_capability(device) >= FP8_SINCE


@cache
def unavailable_reason(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Return why kernels are not used, or None if they are. Takes some seconds the first time.

    A kernel that does not compile there, or whose result is off, is a reason and not an error: torch computes the
    same, more slowly.

    Args:
        device: where.
        dtype: the model's.
        dim: channels of a head.

    Raises:
        torch.OutOfMemoryError: if there is no room to try them.
    """
    if device.type != "cuda":
        return f"there are none for {device.type}"
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    if dtype not in DTYPES or dim > MAX_DIM:
        return f"there are none for {dtype} and {dim} channels a head"
    try:
        errors = kernel_errors(device, dtype, dim)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"they do not run here ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    off = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    return ", ".join(f"{name} is off by {error:.2g}" for name, error in off.items()) or None


def kernel_errors(device: torch.device, dtype: torch.dtype, dim: int) -> dict[str, float]:
    """Run what attends, scores, appends and places on fresh random numbers; return relative errors by what was run.

    In the ways models use it. What `pointwise` does is compared with each model's own modules, see `runtime.fused_layers.fused_modules`.
    """
    from qcfuse_rag.runtime.kernels.context_score import context_scores
    from qcfuse_rag.runtime.kernels.paged_attention import append_rows, table_attention, table_attention_reference
    from qcfuse_rag.runtime.kernels.placement import Block, place_blocks, place_blocks_reference
    from qcfuse_rag.runtime.kernels.sparse_attention import sparse_attention, sparse_attention_reference, takes_tall
    from qcfuse_rag.runtime.kv_table import KVTable
    from qcfuse_rag.runtime.reference_attention import plain_attention_weights
    from qcfuse_rag.store.quantization import quantize

    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    rows = torch.arange(TOKENS - 2 * ROWS, TOKENS, 2, device=device)
    query, key, value = (random(1, HEADS, ROWS, dim), *(random(1, KV_HEADS, TOKENS, dim) for _ in range(2)))
    known = torch.ones(TOKENS, dtype=torch.bool, device=device)
    errors = {}
    plain: dict[str, Any] = {"scaling": dim**-0.5}
    special: dict[str, Any] = {**plain, "softcap": 20.0, "window": TOKENS // 2}
    for name, how, splits in (("", plain, 1), (" split", plain, 2), (" with window and cap", special, 2)):
        errors[f"attention{name}"] = relative_error(
            sparse_attention(query, key, value, rows, **how, splits=splits),
            sparse_attention_reference(query, key, value, rows, **how),
        )
        errors[f"context score{name}"] = relative_error(
            context_scores(query, key, rows, known, **how, splits=splits),
            plain_attention_weights(query.float(), key.float(), rows, known, **how),
        )
    takes_tall(device, dtype, dim)  # compared now: it would be no good time while something is recorded
    shape, ends = KVShape(KV_HEADS, dim, dim), torch.stack([rows, rows - ROWS])
    buffers = [KVBuffer((random(1, KV_HEADS, TOKENS, dim),), (random(1, KV_HEADS, TOKENS, dim),)) for _ in ends]
    table = KVTable.of(buffers, [shape], TOKENS)
    asking, fresh, values = random(2, HEADS, ROWS, dim), random(2, KV_HEADS, ROWS, dim), random(2, KV_HEADS, ROWS, dim)
    append_rows(fresh, values, table, 0, ends)
    for side, given in (("keys", fresh), ("values", values)):
        there = [getattr(buffer, side)[0][0, :, end] for buffer, end in zip(buffers, ends, strict=True)]
        errors[f"append {side}"] = relative_error(torch.stack(there), given)
    for name, how, n_rows, splits in (("", plain, ROWS, 1), (" split", special, ROWS, 2), (" of one row", plain, 1, 2)):
        last = ends[:, -n_rows:].contiguous()
        errors[f"attention by table{name}"] = relative_error(
            table_attention(asking[:, :, :n_rows], table, 0, last, **how, splits=splits),
            table_attention_reference(asking[:, :, :n_rows], buffers, 0, last, **how),
        )
    rope = LayerRope(10000.0 ** -(torch.arange(0, dim // 2 * 2, 2, device=device) / dim))
    for numbers in ("model", "int8"):
        stored: list[tuple[Tensor, Tensor | None]] = [(random(TOKENS, KV_HEADS, dim), None) for _ in range(2)]
        if numbers != "model":
            stored = [quantize(wide, numbers, over=2 * place) for place, (wide, _) in enumerate(stored)]
        placed = torch.zeros(2, 2, 1, KV_HEADS, 2 * TOKENS, dim, dtype=dtype, device=device)
        for sides, how_placed in zip(placed, (place_blocks, place_blocks_reference), strict=True):
            both = zip(stored, sides, (rope, None), strict=True)  # keys, and values by the same launch
            how_placed([Block(*one, into, TOKENS // 2, turned) for one, into, turned in both])
        for kind, (found, expected) in zip(("keys", "values"), placed.transpose(0, 1), strict=True):
            errors[f"place {numbers} {kind}"] = relative_error(found, expected)
    return errors
