"""Norms, rotations and gates, the operations between a layer's matrix products, as one kernel each.

Models write a norm as eight operations of torch, a rotation as ten, a gate as two. For a few rows the start of each
operation takes some microseconds, while all matrix products of a layer take a tenth of a millisecond. The kernels
compute in float32 and round once. `runtime.fused_layers.fused_modules` compares them with a model's own modules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.runtime.kernels.launch import dependent_launch, on_device, wait_for_inputs

ELEMENTS, LONG = 4096, 8192
"""Elements of one program, of several rows if they are short, and the channels from which a program has more warps."""
ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit(do_not_specialize=["n_rows"])
def normalize(
    x,
    weight,
    out,
    n_rows,
    eps,
    offset,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Divide rows by the root of their mean square and multiply them by a weight for each channel."""
    row, dim = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    inside = (row < n_rows)[:, None] & (dim < DIM)[None, :]
    at = row[:, None] * DIM + dim[None, :]
    factor = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32) + offset
    wait_for_inputs(DEPENDENT)
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)
    tl.store(out + at, (wide * scale[:, None] * factor[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(
    x,
    out,
    x_head,
    cos,
    sin,
    cos_upper,
    sin_upper,
    N_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate one row's heads; channel i is turned with channel i + HALF."""
    head, dim = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HALF)
    inside = (head < N_HEADS)[:, None] & (dim < HALF)[None, :]
    at = head[:, None].to(tl.int64) * x_head + dim[None, :]
    lower = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    upper = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = out + head[:, None] * (2 * HALF) + dim[None, :]
    tl.store(to, (lower * cos[None, :] - upper * sin[None, :]).to(out.dtype.element_ty), mask=inside)
    turned = upper * cos_upper[None, :] + lower * sin_upper[None, :]
    tl.store(to + HALF, turned.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def rotate(
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    n_rows,
    query_request,
    query_head,
    query_row,
    key_request,
    key_head,
    key_row,
    angle_request,
    angle_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rotate the queries and keys of one row of one request."""
    wait_for_inputs(DEPENDENT)
    row, request = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, BLOCK_HALF)
    at, there = request * angle_request + row * angle_row + dim, dim < HALF
    lower_cos = tl.load(cos + at, mask=there, other=0.0).to(tl.float32)
    lower_sin = tl.load(sin + at, mask=there, other=0.0).to(tl.float32)
    upper_cos = tl.load(cos + at + HALF, mask=there, other=0.0).to(tl.float32)
    upper_sin = tl.load(sin + at + HALF, mask=there, other=0.0).to(tl.float32)
    which = request * n_rows + row
    rotate_heads(
        query + request * query_request + row * query_row,
        query_out + which * (HEADS * 2 * HALF),
        query_head,
        lower_cos,
        lower_sin,
        upper_cos,
        upper_sin,
        HEADS,
        BLOCK_HEADS,
        HALF,
        BLOCK_HALF,
    )
    rotate_heads(
        key + request * key_request + row * key_row,
        key_out + which * (KV_HEADS * 2 * HALF),
        key_head,
        lower_cos,
        lower_sin,
        upper_cos,
        upper_sin,
        KV_HEADS,
        BLOCK_KV_HEADS,
        HALF,
        BLOCK_HALF,
    )


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """Return the activation of gates in float32: GELU by tanh, or SiLU."""
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # twice the argument of tanh
        opened = gate * (1.0 - 1.0 / (tl.exp(inner) + 1.0))
    else:
        opened = gate / (1.0 + tl.exp(-gate))
    return opened


@triton.jit
def gate(gates, values, out, n, GELU: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Multiply values by the activation of gates.

    Triton compiles two variants: that `n` is a multiple of 16 lets programs load and store 128 bits at a time.
    """
    wait_for_inputs(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(gates + at, mask=at < n, other=0.0).to(tl.float32)
    value = tl.load(values + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, (activated(wide, GELU) * value).to(out.dtype.element_ty), mask=at < n)


def normalized(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return `[.., D]` rows over the root of their mean square and `eps`, times the `[D]` weight and `offset`.

    This is root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467); the offset is 1 in models whose
    weights are differences from 1.
    """
    dim = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    n_rows, block_dim = x.numel() // dim, triton.next_power_of_2(dim)
    block_rows = min(triton.next_power_of_2(n_rows), max(1, ELEMENTS // block_dim))
    with on_device(x.device):
        normalize[(triton.cdiv(n_rows, block_rows),)](
            x,
            weight,
            out,
            n_rows,
            eps,
            offset,
            DIM=dim,
            BLOCK_DIM=block_dim,
            BLOCK_ROWS=block_rows,
            num_warps=8 if block_dim >= LONG else 4,
            **dependent_launch(x.device),
        )
    return out


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[B, Hq, R, D]` queries and `[B, Hkv, R, D]` keys turned by their positions' angles.

    Channel i turns with channel i + D / 2 (Su et al., RoFormer, arXiv 2104.09864). Inputs may have any strides but for
    their last dimension; `cos` and `sin` are `[B, R, D]` or `[1, R, D]`; results are laid out as `[B, R, H, D]`.
    """
    requests, heads, n_rows, dim = query.shape
    kv_heads = key.shape[1]
    outs = [
        torch.empty(requests, n_rows, n, dim, dtype=x.dtype, device=x.device)
        for n, x in ((heads, query), (kv_heads, key))
    ]
    cos, sin = cos.contiguous(), sin.contiguous()
    with on_device(query.device):
        rotate[(n_rows, requests)](
            query,
            key,
            cos,
            sin,
            *outs,
            n_rows,
            *query.stride()[:3],
            *key.stride()[:3],
            0 if len(cos) == 1 else cos.stride(0),
            cos.stride(1),
            HEADS=heads,
            KV_HEADS=kv_heads,
            BLOCK_HEADS=triton.next_power_of_2(heads),
            BLOCK_KV_HEADS=triton.next_power_of_2(kv_heads),
            HALF=dim // 2,
            BLOCK_HALF=triton.next_power_of_2(dim // 2),
            **dependent_launch(query.device),
        )
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


def gated(gates: Tensor, values: Tensor, activation: str) -> Tensor:
    """Return `activation(gates) * values`; the activation is one of `ACTIVATIONS`."""
    gates, values = gates.contiguous(), values.contiguous()
    out = torch.empty_like(gates)
    block = 1024
    with on_device(gates.device):
        gate[(triton.cdiv(out.numel(), block),)](
            gates,
            values,
            out,
            out.numel(),
            GELU=activation == "gelu_tanh",
            BLOCK=block,
            **dependent_launch(gates.device),
        )
    return out
