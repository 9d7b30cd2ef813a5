"""Kernels in torch that round as the kernels on a GPU do: they compute in float32 and round the result once.

Triton's interpreter cannot multiply bfloat16, and is slow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.runtime.fused_layers import pointwise, skinny_products
from qcfuse_rag.runtime.kernels import table_attention as by_table
from qcfuse_rag.runtime.kernels.sparse_attention import sparse_attention_reference
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.rows import AttentionParams
from tests.support import seams


def compute_kernels_in_torch(patch: pytest.MonkeyPatch) -> None:
    """Have recorded passes and steps on a CPU use kernels that are computed in torch."""
    for name, kernel in (("normalized", normalized), ("rotated", rotated), ("gated", gated)):
        patch.setattr(pointwise, name, kernel)
    for name, product in (("projected", projected), ("gate_projected", gate_projected)):
        patch.setattr(skinny_products, name, product)
    patch.setattr(by_table, "append_rows", append_rows)
    patch.setattr(by_table, "table_attention", table_attention)
    seams.recorder_has_kernels(patch, lambda *_: True)


def normalized(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute what the kernel `normalize` does."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * (weight.float() + offset)).to(x.dtype)


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what the kernel `rotate` does."""

    def turn(x: Tensor) -> Tensor:
        lower, upper = x.float().chunk(2, -1)
        turned = x.float() * cos.float()[:, None] + torch.cat([-upper, lower], -1) * sin.float()[:, None]
        return turned.to(x.dtype).transpose(1, 2).contiguous().transpose(1, 2)

    return turn(query), turn(key)


def gated(gates: Tensor, values: Tensor, activation: str) -> Tensor:
    """Compute what the kernel `gate` does."""
    wide = gates.float()
    opened = functional.silu(wide) if activation == "silu" else functional.gelu(wide, approximate="tanh")
    return (opened * values.float()).to(gates.dtype)


def projected(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Compute what the kernel `project` does."""
    pairs = zip(weights, biases or [None] * len(weights), strict=True)
    return [
        functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
        for weight, bias in pairs
    ]


def gate_projected(x: Tensor, gates: Tensor, values: Tensor, activation: str) -> Tensor:
    """Compute what the kernel `project_gated` does."""
    wide = x.float()
    both = functional.linear(wide, gates.float()), functional.linear(wide, values.float())
    return gated(*both, activation).to(x.dtype)


def append_rows(key: Tensor, value: Tensor, table: KVTable, layer: int, rows: Tensor) -> None:
    """Compute what the kernel `append` does."""
    for request, positions in enumerate(rows):
        for side, fresh in enumerate((key, value)):
            stored = _stored(table, layer, request, side, int(positions.max()) + 1)
            stored.index_copy_(1, positions, fresh[request])


def table_attention(query: Tensor, table: KVTable, layer: int, rows: Tensor, params: AttentionParams) -> Tensor:
    """Compute what the kernel `attend` does with a table."""
    results = []
    for request, positions in enumerate(rows):
        key, value = (_stored(table, layer, request, side, int(positions.max()) + 1)[None] for side in (0, 1))
        request_query = query[request : request + 1]
        results.append(sparse_attention_reference(request_query, key, value, positions, params).to(query.dtype))
    return torch.cat(results)


def _stored(table: KVTable, layer: int, request: int, side: int, length: int) -> Tensor:
    """Return a view of the keys (side 0) or values (side 1) of a request: `[Hkv, length, D]`."""
    entry, shape = table.entries[layer, request].tolist(), table.shapes[layer]
    address, stride, dim = entry[side], entry[2 + side], (shape.key_dim, shape.value_dim)[side]
    size = (shape.kv_heads - 1) * stride + length * dim
    memory = (ctypes.c_char * (size * table.dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=table.dtype).as_strided((shape.kv_heads, length, dim), (stride, dim, 1))
