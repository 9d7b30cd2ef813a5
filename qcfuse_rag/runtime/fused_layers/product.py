"""Products of a few rows with weights, each with what a model computes right before and after it in the same kernel.

A decode step takes as long as reading the weights does. Between two kernels little is read, for some microseconds,
while the last programs of one end and the first of the other begin, and a Qwen3 layer has 18 where each does one thing.
So weights that multiply the same rows are read by one kernel, in which rows are normalised before, and gates opened or
the rows that were there before added after. All is added up in float32.

Rows that are normalised are multiplied by the norm's weight first, rounded, and multiplied by one over the root of
their mean square last, which is known when all of a row has been read. Float16 has no room for numbers that have not
been made smaller yet, so its rows are not normalised here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qcfuse_rag.runtime.fused_layers.pointwise import Norm, activated
from qcfuse_rag.runtime.kernels.launch import on_device

MOST_ROWS = 16
"""That are multiplied at once: the fewest that matrix units take."""
MOST_WEIGHTS = 3
LARGEST = 1 << 31
"""Elements of a weight, exclusive: they are counted in 32 bits."""
NORMALISED = (torch.float32, torch.bfloat16)
"""Dtypes with room for a row that has been multiplied by its norm's weight, but not made smaller yet."""


@dataclass(frozen=True, slots=True)
class Strip:
    """What a program of these kernels takes.

    Attributes:
        columns: of the result, which are rows of a weight.
        depth: channels that are multiplied in one turn of its loop.
        warps: of 32 threads, that share the work.
        stages: turns whose weights are on their way at once.
    """

    columns: int
    depth: int
    warps: int = 4
    stages: int = 4


STRIPS = (Strip(16, 256), Strip(32, 128))
"""That are tried on a device: the first has more programs, the second reads the rows less often."""


@triton.jit
def rows_at(x, norm, row, channel, n_rows, offset, DIM: tl.constexpr, NORMED: tl.constexpr):
    """Return some channels of rows, ready to be multiplied, and the sum of each row's squares."""
    inside = (row < n_rows)[:, None] & (channel < DIM)[None, :]
    given = tl.load(x + row[:, None] * DIM + channel[None, :], mask=inside, other=0.0)
    squares = tl.zeros([row.shape[0]], tl.float32)
    if NORMED:
        wide = given.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        factor = tl.load(norm + channel, mask=channel < DIM, other=0.0).to(tl.float32) + offset
        given = (wide * factor[None, :]).to(x.dtype.element_ty)
    return given, squares


@triton.jit
def weights_at(weight, column, channel, n_columns, DIM: tl.constexpr):
    """Return some channels of a weight's rows, turned; they are read once, so others may stay in the cache instead."""
    inside = (column < n_columns)[:, None] & (channel < DIM)[None, :]
    at = weight + column[:, None] * DIM + channel[None, :]
    return tl.trans(tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first"))


@triton.jit(do_not_specialize=["n_rows"])
def project(
    x,
    norm,
    first,
    second,
    third,
    first_bias,
    second_bias,
    third_bias,
    residual,
    out,
    n_rows,
    eps,
    offset,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    DIM: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply rows by some rows of one of three weights."""
    block = tl.program_id(0)
    weight, bias, n_columns, begin = first, first_bias, FIRST, 0
    if block >= tl.cdiv(FIRST, COLUMNS):
        block -= tl.cdiv(FIRST, COLUMNS)
        weight, bias, n_columns, begin = second, second_bias, SECOND, FIRST
        if block >= tl.cdiv(SECOND, COLUMNS):
            block -= tl.cdiv(SECOND, COLUMNS)
            weight, bias, n_columns, begin = third, third_bias, THIRD, FIRST + SECOND
    row, column = tl.arange(0, BLOCK_ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    found, squares = tl.zeros([BLOCK_ROWS, COLUMNS], tl.float32), tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(0, DIM, DEPTH):
        channel = start + tl.arange(0, DEPTH)
        given, more = rows_at(x, norm, row, channel, n_rows, offset, DIM, NORMED)
        squares += more
        found = tl.dot(given, weights_at(weight, column, channel, n_columns, DIM), found, input_precision="ieee")
    if NORMED:
        found *= tl.rsqrt(squares / DIM + eps)[:, None]
    if BIASED:
        found += tl.load(bias + column, mask=column < n_columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    at = row[:, None] * (FIRST + SECOND + THIRD) + begin + column[None, :]
    if ADDED:
        found += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def project_gated(
    x,
    norm,
    gates,
    values,
    out,
    n_rows,
    eps,
    offset,
    N_COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
    NORMED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply rows by some rows of two weights, and one product by what an activation makes of the other."""
    row, column = tl.arange(0, BLOCK_ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    gate, value = tl.zeros([BLOCK_ROWS, COLUMNS], tl.float32), tl.zeros([BLOCK_ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(0, DIM, DEPTH):
        channel = start + tl.arange(0, DEPTH)
        given, more = rows_at(x, norm, row, channel, n_rows, offset, DIM, NORMED)
        squares += more
        gate = tl.dot(given, weights_at(gates, column, channel, N_COLUMNS, DIM), gate, input_precision="ieee")
        value = tl.dot(given, weights_at(values, column, channel, N_COLUMNS, DIM), value, input_precision="ieee")
    if NORMED:
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        gate *= scale
        value *= scale
    found = activated(gate, GELU) * value
    inside = (row < n_rows)[:, None] & (column < N_COLUMNS)[None, :]
    tl.store(out + row[:, None] * N_COLUMNS + column[None, :], found.to(out.dtype.element_ty), mask=inside)


def projected(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    strip: Strip = STRIPS[0],
) -> Tensor:
    """Return products of rows with one to three weights, side by side.

    Args:
        x: `[.., D]`, of at most `MOST_ROWS` rows.
        weights: each `[N, D]`.
        biases: of each weight `[N]`, or None if there are none.
        norm: by which to normalise the rows before, or None.
        residual: `[.., N in all]`, to add after, or None.
        strip: what a program takes.

    Returns:
        `[.., N in all]` in the dtype of `x`.

    Raises:
        ValueError: if operands do not fit each other.
    """
    columns = [len(weight) for weight in weights]
    if not 0 < len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"one to {MOST_WEIGHTS} weights are multiplied at once, got {len(weights)}")
    if biases is not None and [tuple(bias.shape) for bias in biases] != [(count,) for count in columns]:
        raise ValueError(f"biases must be {columns} long, got {[tuple(bias.shape) for bias in biases]}")
    if residual is not None and residual.shape != (*x.shape[:-1], sum(columns)):
        raise ValueError(f"a residual must be {(*x.shape[:-1], sum(columns))}, got {tuple(residual.shape)}")
    given, n_rows = _rows(x, weights, norm, (*(biases or ()), *(() if residual is None else (residual,))))
    by = norm or Norm(given, 0.0)
    out = torch.empty(*x.shape[:-1], sum(columns), dtype=x.dtype, device=x.device)
    none = [0] * (MOST_WEIGHTS - len(weights))
    multiplied, added = [*weights, *(weights[0] for _ in none)], list(biases or weights)
    with on_device(x.device):
        project[(sum(triton.cdiv(count, strip.columns) for count in columns),)](
            given,
            by.weight,
            *multiplied,
            *added,
            *(added[0] for _ in none),
            given if residual is None else residual.contiguous(),
            out,
            n_rows,
            by.eps,
            by.offset,
            *columns,
            *none,
            DIM=x.shape[-1],
            NORMED=norm is not None,
            BIASED=biases is not None,
            ADDED=residual is not None,
            BLOCK_ROWS=MOST_ROWS,
            COLUMNS=strip.columns,
            DEPTH=strip.depth,
            num_warps=strip.warps,
            num_stages=strip.stages,
        )
    return out


def gate_projected(
    x: Tensor, gates: Tensor, values: Tensor, activation: str, *, norm: Norm | None = None, strip: Strip = STRIPS[0]
) -> Tensor:
    """Return `activation(x @ gates.T) * (x @ values.T)`, the first half of a gated feed-forward network.

    Args:
        x: `[.., D]`, of at most `MOST_ROWS` rows.
        gates: `[N, D]`.
        values: `[N, D]`.
        activation: one of `pointwise.ACTIVATIONS`.
        norm: by which to normalise the rows before, or None.
        strip: what a program takes.

    Returns:
        `[.., N]` in the dtype of `x`.

    Raises:
        ValueError: if operands do not fit each other.
    """
    if gates.shape != values.shape:
        raise ValueError(f"gates {tuple(gates.shape)} do not fit values {tuple(values.shape)}")
    given, n_rows = _rows(x, (gates, values), norm, ())
    by = norm or Norm(given, 0.0)
    out = torch.empty(*x.shape[:-1], len(gates), dtype=x.dtype, device=x.device)
    with on_device(x.device):
        project_gated[(triton.cdiv(len(gates), strip.columns),)](
            given,
            by.weight,
            gates,
            values,
            out,
            n_rows,
            by.eps,
            by.offset,
            N_COLUMNS=len(gates),
            DIM=x.shape[-1],
            NORMED=norm is not None,
            GELU=activation == "gelu_tanh",
            BLOCK_ROWS=MOST_ROWS,
            COLUMNS=strip.columns,
            DEPTH=strip.depth,
            num_warps=strip.warps,
            num_stages=strip.stages,
        )
    return out


def _rows(x: Tensor, weights: Sequence[Tensor], norm: Norm | None, others: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return rows side by side, and how many they are, after checking what they are multiplied with."""
    dim = x.shape[-1]
    n_rows = x.numel() // dim
    if not 0 < n_rows <= MOST_ROWS:
        raise ValueError(f"one to {MOST_ROWS} rows are multiplied at once, got {n_rows}")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != dim or not weight.is_contiguous() or weight.numel() >= LARGEST:
            raise ValueError(f"a weight must be [columns, {dim}], side by side, got {tuple(weight.shape)}")
    if norm is not None and (norm.weight.shape != (dim,) or x.dtype not in NORMALISED):
        raise ValueError(f"rows of {dim} {x.dtype} are not normalised here by {tuple(norm.weight.shape)}")
    for one in (*weights, *others, *(() if norm is None else (norm.weight,))):
        if one.dtype != x.dtype or one.device != x.device:
            raise ValueError(f"rows of {x.dtype} on {x.device} with {one.dtype} on {one.device}")
    return x.contiguous(), n_rows
