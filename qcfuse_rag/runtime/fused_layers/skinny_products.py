"""Matrix products of a few rows with one or several weights, in one kernel (skinny GEMM).

A decode step takes as long as reading the weights. Between two kernels the device reads little for some microseconds,
and a library splits the small products of a few rows into a product and a sum. So queries, keys and values are
projected by one kernel, and the gates and values of a feed-forward network by another, with the activation between.
The products that follow these are not split. All is summed in float32. Weights in int8 with a scale a row, as
torchao keeps them, are widened as they are read.

Microseconds for one row of Qwen3-8B's layers in bfloat16 on an H200 (2026-11-26), without early reading:

    product                         here   library   lower bound
    queries, keys and values        15.6      29.0          12.2
    output of attention             12.1      12.6           8.2
    gates and values                48.6         -          49.1
    output of feed-forward network  27.7      30.5          24.5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from qcfuse_rag.runtime.fused_layers.pointwise import activated
from qcfuse_rag.runtime.kernels.launch import (
    concurrent_programs,
    dependent_launch,
    holds_large_tile,
    let_next_start,
    on_device,
    wait_for_inputs,
)

MAX_ROWS = 32
"""Rows that one program multiplies at once."""
MIN_BLOCK_ROWS = 16
"""The fewest rows that matrix units take."""
MAX_WEIGHTS = 3
MAX_ELEMENTS = 1 << 31
"""Of a weight, exclusive: kernels count them in 32 bits."""
DTYPES = (torch.bfloat16, torch.float16)
COLUMNS, DEPTH, WARPS = 32, 128, 4
"""Columns of a program, channels of a loop iteration, and warps: the fastest of twelve choices for the shapes above,
without early reading."""
PRELOADED, GATED_PRELOADED = 512, 256
"""Channels of the weights that a program reads while it waits for its rows: of one weight, and of two."""
STAGES, GATED_STAGES = 6, 4
"""Iterations whose weights are loaded at once: of one weight, and of two."""


@triton.jit
def load_rows(x, row, channel, n_rows, DIM: tl.constexpr):
    """Load some channels of rows."""
    inside = (row < n_rows)[:, None] & (channel < DIM)[None, :]
    return tl.load(x + row[:, None] * DIM + channel[None, :], mask=inside, other=0.0)


@triton.jit
def load_weights(weight, column, channel, n_columns, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Load some channels of a weight's rows, transposed; they are read once, so the cache need not keep them."""
    inside = (column < n_columns)[:, None] & (channel < DIM)[None, :]
    at = weight + column[:, None] * DIM + channel[None, :]
    return tl.trans(tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(DTYPE))


@triton.jit(do_not_specialize=["n_rows"])
def project(
    x,
    first,
    second,
    third,
    first_bias,
    second_bias,
    third_bias,
    first_scale,
    second_scale,
    third_scale,
    out,
    n_rows,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    DIM: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PRELOADED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Multiply rows by some rows of one of three weights; the results of one weight lie behind those of the last."""
    block = tl.program_id(0)
    weight, bias, scale, n_columns, begin = first, first_bias, first_scale, FIRST, 0
    if block >= tl.cdiv(FIRST, BLOCK_COLUMNS):
        block -= tl.cdiv(FIRST, BLOCK_COLUMNS)
        weight, bias, scale, n_columns, begin = second, second_bias, second_scale, SECOND, FIRST
        if block >= tl.cdiv(SECOND, BLOCK_COLUMNS):
            block -= tl.cdiv(SECOND, BLOCK_COLUMNS)
            weight, bias, scale, n_columns, begin = third, third_bias, third_scale, THIRD, FIRST + SECOND
    row, column = tl.arange(0, BLOCK_ROWS), block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    if DEPENDENT:  # read weights while the kernel before still computes the rows
        let_next_start(DEPENDENT)
        early = tl.arange(0, PRELOADED)
        weights = load_weights(weight, column, early, n_columns, DIM, x.dtype.element_ty)
        wait_for_inputs(DEPENDENT)
        total = tl.dot(load_rows(x, row, early, n_rows, DIM), weights, total)
    for start in range(PRELOADED if DEPENDENT else 0, DIM, BLOCK_DEPTH):
        channel = start + tl.arange(0, BLOCK_DEPTH)
        rows = load_rows(x, row, channel, n_rows, DIM)
        total = tl.dot(rows, load_weights(weight, column, channel, n_columns, DIM, x.dtype.element_ty), total)
    if SCALED:
        total *= tl.load(scale + column, mask=column < n_columns, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        total += tl.load(bias + column, mask=column < n_columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    # `[weight, row, column]`, so that each weight's results are contiguous.
    at = begin * n_rows + row[:, None] * n_columns + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def project_gated(
    x,
    gates,
    values,
    gate_scale,
    value_scale,
    out,
    n_rows,
    N_COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
    GELU: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PRELOADED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Multiply rows by some rows of two weights, and one product by the activation of the other."""
    row, column = tl.arange(0, BLOCK_ROWS), tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    gate = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    value = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    if DEPENDENT:  # as in `project`
        let_next_start(DEPENDENT)
        early = tl.arange(0, PRELOADED)
        gate_weights = load_weights(gates, column, early, N_COLUMNS, DIM, x.dtype.element_ty)
        value_weights = load_weights(values, column, early, N_COLUMNS, DIM, x.dtype.element_ty)
        wait_for_inputs(DEPENDENT)
        early_rows = load_rows(x, row, early, n_rows, DIM)
        gate = tl.dot(early_rows, gate_weights, gate)
        value = tl.dot(early_rows, value_weights, value)
    for start in range(PRELOADED if DEPENDENT else 0, DIM, BLOCK_DEPTH):
        channel = start + tl.arange(0, BLOCK_DEPTH)
        rows = load_rows(x, row, channel, n_rows, DIM)
        gate = tl.dot(rows, load_weights(gates, column, channel, N_COLUMNS, DIM, x.dtype.element_ty), gate)
        value = tl.dot(rows, load_weights(values, column, channel, N_COLUMNS, DIM, x.dtype.element_ty), value)
    if SCALED:
        gate *= tl.load(gate_scale + column, mask=column < N_COLUMNS, other=0.0).to(tl.float32)[None, :]
        value *= tl.load(value_scale + column, mask=column < N_COLUMNS, other=0.0).to(tl.float32)[None, :]
    inside = (row < n_rows)[:, None] & (column < N_COLUMNS)[None, :]
    found = activated(gate, GELU) * value
    tl.store(out + row[:, None] * N_COLUMNS + column[None, :], found.to(out.dtype.element_ty), mask=inside)


class StoredWeight(NamedTuple):
    """The numbers of a weight, `[N, D]`, and a scale for each of its rows, `[N, 1]`, if they need one."""

    numbers: Tensor
    scale: Tensor | None


def stored_weight(weight: Tensor) -> StoredWeight | None:
    """Return how a weight is stored; None for any format but a plain tensor and torchao's int8."""
    if type(weight) in (Tensor, nn.Parameter):
        return StoredWeight(weight, None)
    numbers, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if numbers is None or scale is None or numbers.dtype != torch.int8:
        return None
    if numbers.shape != weight.shape or scale.shape != (len(weight), 1):
        return None
    if any(getattr(weight, name, None) is not None for name in ("act_quant_kwargs", "act_pre_scale")):
        return None  # the rows are to be quantised too
    return StoredWeight(numbers, scale)


def supports(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether these rows are multiplied with these weights here."""
    n_rows = x.numel() // x.shape[-1]
    if x.dtype not in DTYPES or not 0 < n_rows <= MAX_ROWS:
        return False
    stored = [stored_weight(weight) for weight in weights]
    return len({each and (each.numbers.dtype, each.scale is None) for each in stored}) == 1 and all(
        each is not None
        and each.numbers.dim() == 2
        and each.numbers.shape[1] == x.shape[-1]
        and each.numbers.is_contiguous()
        and each.numbers.numel() < MAX_ELEMENTS
        and (weight.dtype, weight.device) == (x.dtype, x.device)
        for each, weight in zip(stored, weights, strict=True)
    )


def projected(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return the products of `[.., D]` rows with one to three `[N, D]` weights: each `[.., N]` in the dtype of `x`."""
    columns = [len(weight) for weight in weights]
    dim, x = x.shape[-1], x.contiguous()
    n_rows = x.numel() // dim
    out = torch.empty(n_rows * sum(columns), dtype=x.dtype, device=x.device)
    numbers, scales = _numbers_and_scales(weights)
    programs = sum(triton.cdiv(count, COLUMNS) for count in columns)
    with on_device(x.device):
        project[(programs,)](
            x,
            *_padded(numbers),
            *_padded(biases or numbers),
            *_padded(scales or numbers),
            out,
            n_rows,
            *columns,
            *[0] * (MAX_WEIGHTS - len(columns)),
            DIM=dim,
            BIASED=biases is not None,
            SCALED=scales is not None,
            BLOCK_ROWS=_block_rows(n_rows),
            BLOCK_COLUMNS=COLUMNS,
            BLOCK_DEPTH=_depth(programs, x.device),
            PRELOADED=PRELOADED,
            num_warps=WARPS,
            num_stages=STAGES,
            **dependent_launch(x.device),
        )
    parts = out.split([n_rows * count for count in columns])
    return [part.view(*x.shape[:-1], count) for part, count in zip(parts, columns, strict=True)]


def gate_projected(x: Tensor, gates: Tensor, values: Tensor, activation: str) -> Tensor:
    """Return `activation(x @ gates.T) * (x @ values.T)`, `[.., N]`, for `x` `[.., D]` and `[N, D]` weights."""
    dim, x = x.shape[-1], x.contiguous()
    n_rows = x.numel() // dim
    out = torch.empty(*x.shape[:-1], len(gates), dtype=x.dtype, device=x.device)
    numbers, scales = _numbers_and_scales((gates, values))
    with on_device(x.device):
        project_gated[(triton.cdiv(len(gates), COLUMNS),)](
            x,
            *numbers,
            *(scales or numbers),
            out,
            n_rows,
            N_COLUMNS=len(gates),
            DIM=dim,
            GELU=activation == "gelu_tanh",
            SCALED=scales is not None,
            BLOCK_ROWS=_block_rows(n_rows),
            BLOCK_COLUMNS=COLUMNS,
            BLOCK_DEPTH=DEPTH,
            PRELOADED=GATED_PRELOADED if n_rows <= MIN_BLOCK_ROWS else DEPTH,
            num_warps=WARPS,
            num_stages=GATED_STAGES,
            **dependent_launch(x.device),
        )
    return out


def _numbers_and_scales(weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
    stored = [each for each in map(stored_weight, weights) if each is not None]
    return [each.numbers for each in stored], [each.scale for each in stored if each.scale is not None] or None


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*tensors, *[tensors[0]] * (MAX_WEIGHTS - len(tensors))]


def _depth(programs: int, device: torch.device) -> int:
    """Return the channels of a loop iteration: twice as many for a program that has a multiprocessor to itself."""
    return 2 * DEPTH if holds_large_tile(device) and 2 * programs <= concurrent_programs(device) else DEPTH


def _block_rows(n_rows: int) -> int:
    return MIN_BLOCK_ROWS if n_rows <= MIN_BLOCK_ROWS else MAX_ROWS
