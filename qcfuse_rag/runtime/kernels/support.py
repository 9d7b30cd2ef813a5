"""Decide whether kernels are used on a device: only after each agreed with its reference there."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from qcfuse_rag.models.rope import KVShape, LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.kernels.limits import TOLERANCE, relative_error

LOG = logging.getLogger(__name__)

SWITCH = "QCFUSE_KERNELS"
"""Environment variable; `0` switches the kernels off, so that torch computes everything."""
OLDEST = (8, 0)
"""Oldest compute capability that is supported: Ampere, the first with bfloat16."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 256
ROWS, TOKENS, HEADS, KV_HEADS = 40, 300, 8, 2
"""Of the operands on which kernels are compared with their references."""


def kernels_available(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Return whether kernels are used on a device for a dtype and channels per head."""
    if device.type != "cuda":
        return False
    try:
        return unavailable_reason(device, dtype, dim) is None
    except torch.OutOfMemoryError:
        return False  # not cached: the next call may have enough memory for the check


def supports_kernels(query: Tensor, key_or_value: Tensor) -> bool:
    """Return whether the kernels attend with these queries and keys or values; otherwise torch does."""
    dim = max(query.shape[-1], key_or_value.shape[-1])
    return len(query) == 1 and kernels_available(query.device, query.dtype, dim)


@cache
def unavailable_reason(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Return why kernels are not used, or None if they are. The first call takes some seconds.

    A kernel that does not compile, or gives a wrong result, is a reason and not an error: torch computes the same, more
    slowly.

    Raises:
        torch.OutOfMemoryError: if there is not enough memory for the check.
    """
    if device.type != "cuda":
        return f"there are none for {device.type}"
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    if find_spec("triton") is None:
        LOG.warning("%s computes in torch alone, several times slower: Triton is not installed", device)
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
        message = str(error).splitlines()[0] if str(error) else ""
        reason = f"they do not run here ({type(error).__name__}: {message})"
    else:
        off = {name: error for name, error in errors.items() if not error <= TOLERANCE}
        reason = ", ".join(f"{name} is off by {error:.2g}" for name, error in off.items())
    if reason:  # once for each device and dtype, as results are cached
        LOG.warning("%s computes in torch alone, several times slower; kernels are not used: %s", device, reason)
    return reason or None


def kernel_errors(device: torch.device, dtype: torch.dtype, dim: int) -> dict[str, float]:
    """Run the kernels that attend, score, append and place on random numbers; return their relative errors by name.

    They are run as models use them. The kernels of `pointwise` are compared with each model's own modules instead, see
    `runtime.fused_layers.fused_modules`.
    """
    from qcfuse_rag.runtime.kernels.context_score import context_scores
    from qcfuse_rag.runtime.kernels.placement import PlacementBlock, place_blocks, place_blocks_reference
    from qcfuse_rag.runtime.kernels.sparse_attention import (
        sparse_attention,
        sparse_attention_reference,
        supports_large_tile,
    )
    from qcfuse_rag.runtime.kernels.table_attention import append_rows, table_attention, table_attention_reference
    from qcfuse_rag.runtime.kv_table import KVTable
    from qcfuse_rag.runtime.reference_attention import plain_attention_weights
    from qcfuse_rag.runtime.rows import AttentionParams
    from qcfuse_rag.store.quantization import quantize

    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    rows = torch.arange(TOKENS - 2 * ROWS, TOKENS, 2, device=device)
    query, key, value = (random(1, HEADS, ROWS, dim), *(random(1, KV_HEADS, TOKENS, dim) for _ in range(2)))
    known = torch.ones(TOKENS, dtype=torch.bool, device=device)
    errors = {}
    plain = AttentionParams(dim**-0.5)
    special = AttentionParams(dim**-0.5, softcap=20.0, window=TOKENS // 2, sinks=random(HEADS))
    for name, params, splits in (("", plain, 1), (" split", special, 2)):
        errors[f"attention{name}"] = relative_error(
            sparse_attention(query, key, value, rows, params, splits=splits),
            sparse_attention_reference(query, key, value, rows, params),
        )
        errors[f"context score{name}"] = relative_error(
            context_scores(query, key, rows, known, params, splits=splits),
            plain_attention_weights(query.float(), key.float(), rows, known, params),
        )
    # Checked and cached here, because it cannot be checked while a graph is recorded.
    supports_large_tile(device, dtype, dim)
    shape, ends = KVShape(KV_HEADS, dim, dim), torch.stack([rows, rows - ROWS])
    buffers = [KVBuffer((random(1, KV_HEADS, TOKENS, dim),), (random(1, KV_HEADS, TOKENS, dim),)) for _ in ends]
    table = KVTable.of(buffers, [shape], TOKENS)
    queries, fresh, values = random(2, HEADS, ROWS, dim), random(2, KV_HEADS, ROWS, dim), random(2, KV_HEADS, ROWS, dim)
    append_rows(fresh, values, table, 0, ends)
    for side, appended in (("keys", fresh), ("values", values)):
        stored_rows = [getattr(buffer, side)[0][0, :, end] for buffer, end in zip(buffers, ends, strict=True)]
        errors[f"append {side}"] = relative_error(torch.stack(stored_rows), appended)
    for name, params, n_rows, splits in (("", special, ROWS, 1), (" of one row", plain, 1, 2)):
        last = ends[:, -n_rows:].contiguous()
        errors[f"attention by table{name}"] = relative_error(
            table_attention(queries[:, :, :n_rows], table, 0, last, params, splits=splits),
            table_attention_reference(queries[:, :, :n_rows], buffers, 0, last, params),
        )
    rope = LayerRope(10000.0 ** -(torch.arange(0, dim // 2 * 2, 2, device=device) / dim))
    for kv_dtype in ("model", "int8"):
        stored: list[tuple[Tensor, Tensor | None]] = [(random(TOKENS, KV_HEADS, dim), None) for _ in range(2)]
        if kv_dtype != "model":
            stored = [quantize(tensor, over=2 * side) for side, (tensor, _) in enumerate(stored)]
        placed = torch.zeros(2, 2, 1, KV_HEADS, 2 * TOKENS, dim, dtype=dtype, device=device)
        for sides, place in zip(placed, (place_blocks, place_blocks_reference), strict=True):
            keys_and_values = zip(stored, sides, (rope, None), strict=True)  # placed by the same launch
            place([PlacementBlock(*block, into, TOKENS // 2, rotation) for block, into, rotation in keys_and_values])
        for kind, (result, expected) in zip(("keys", "values"), placed.transpose(0, 1), strict=True):
            errors[f"place {kv_dtype} {kind}"] = relative_error(result, expected)
    return errors
