"""Whether kernels are used on a device: only where each has just been compared with its reference."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from qcfuse_rag.model.rope import LayerRope

SWITCH = "QCFUSE_KERNELS"
"""Environment variable; `0` has everything computed by torch."""
OLDEST = (8, 0)
"""Compute capability: Ampere, the first with bfloat16."""
TOLERANCE = 1e-2
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 256
ROWS, TOKENS, HEADS, KV_HEADS, DIM = 40, 300, 8, 2, 64


def kernels_run_on(device: torch.device) -> bool:
    """Return whether kernels are used on a device."""
    return device.type == "cuda" and kernel_refusal(device) is None


def kernels_take(query: Tensor, key: Tensor) -> bool:
    """Return whether kernels attend with these queries, keys or values; what they do not take, torch does."""
    fits = len(query) == 1 and max(query.shape[-1], key.shape[-1]) <= MAX_DIM and query.dtype in DTYPES
    return fits and kernels_run_on(query.device)


@cache
def kernel_refusal(device: torch.device) -> str | None:
    """Return why kernels are not used on a device, or None if they are. Takes some seconds the first time.

    A kernel that does not compile there, or whose result is off, is a reason and not an error: torch computes the
    same, more slowly.
    """
    if device.type != "cuda":
        return f"there are none for {device.type}"
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    try:
        errors = kernel_errors(device, torch.float16)
    except Exception as error:
        return f"they do not run here ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    off = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    return ", ".join(f"{name} is off by {error:.2g}" for name, error in off.items()) or None


def kernel_errors(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Run every kernel once on fresh random numbers; return its relative error against plain torch."""
    from qcfuse_rag.fuse.kernels.attention import sparse_attention, sparse_attention_reference
    from qcfuse_rag.fuse.kernels.context_score import context_scores
    from qcfuse_rag.fuse.kernels.place import Block, place_blocks, place_blocks_reference
    from qcfuse_rag.fuse.score import plain_attention_weights

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    rows = torch.arange(TOKENS - 2 * ROWS, TOKENS, 2, device=device)
    query, key, value = (random(1, HEADS, ROWS, DIM), *(random(1, KV_HEADS, TOKENS, DIM) for _ in range(2)))
    about = {"scaling": DIM**-0.5}
    known = torch.ones(TOKENS, dtype=torch.bool, device=device)
    rope = LayerRope(10000.0 ** -(torch.arange(0, DIM, 2, device=device) / DIM))
    stored = random(TOKENS, KV_HEADS, DIM)
    placed = [torch.zeros(1, KV_HEADS, 2 * TOKENS, DIM, dtype=dtype, device=device) for _ in range(2)]
    for into, how in zip(placed, (place_blocks, place_blocks_reference), strict=True):
        how([Block(stored, None, into, TOKENS // 2, rope)])
    return {
        "attention": _off(
            sparse_attention(query, key, value, rows, **about),
            sparse_attention_reference(query, key, value, rows, **about),
        ),
        "context score": _off(
            context_scores(query, key, rows, known, **about),
            plain_attention_weights(query.float(), key.float(), rows, known, **about),
        ),
        "place": _off(*placed),
    }


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())
