"""Random operands in poisoned buffers for kernel tests, and the relative error of a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.kv_table import KVTable
from tests.support.recorders import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="Triton's interpreter cannot multiply bfloat16 matrices"),
    ),
]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """`|result - expected| / |expected|`; NaN never passes a comparison."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def operands(
    heads: int, kv_heads: int, rows: list[int], length: int, dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fresh random queries, and keys and values as views into a larger, poisoned buffer."""
    query = torch.randn(1, len(rows), heads, dim).to(DEVICE, dtype).transpose(1, 2)
    buffers = []
    for channels in (dim, value_dim):
        buffer = torch.full((1, kv_heads, length + 13, channels), float("nan"), device=DEVICE, dtype=dtype)
        buffer[:, :, :length] = torch.randn(1, kv_heads, length, channels).to(DEVICE, dtype)
        buffers.append(buffer[:, :, :length])
    return query, buffers[0], buffers[1], torch.tensor(rows, device=DEVICE)


def tabled(
    rows: list[list[int]], heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, layers: int = 2
) -> tuple[Tensor, list[KVBuffer], KVTable, Tensor]:
    """Random queries of requests of different lengths, whose buffers hold NaN after the last row of each."""
    shapes, buffers = [KVShape(kv_heads, dim, value_dim)] * layers, []
    ends = [positions[-1] + 1 for positions in rows]
    for end in ends:
        buffer = KVBuffer.allocate(tuple(shapes), end + 9 * len(buffers), dtype=dtype, device=DEVICE)
        for tensor in (*buffer.keys, *buffer.values):
            tensor.copy_(torch.randn(tensor.shape))[:, :, end:] = float("nan")
        buffers.append(buffer)
    query = torch.randn(len(rows), len(rows[0]), heads, dim).to(DEVICE, dtype).transpose(1, 2)
    return query, buffers, KVTable.of(buffers, shapes, max(ends)), torch.tensor(rows, device=DEVICE)


def watched(kernel: Any, launched: list[dict[str, Any]]) -> Any:
    """A kernel that records the constants of its launches."""

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*operands: Any, **constants: Any) -> None:
                launched.append(constants)
                kernel[grid](*operands, **constants)

            return launch

    return Watched()
