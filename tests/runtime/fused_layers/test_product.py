"""Products of few rows against torch: under the interpreter, compiled where there is a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from qcfuse_rag.runtime.fused_layers.pointwise import Norm, normalized
from qcfuse_rag.runtime.fused_layers.product import STRIPS, Strip, gate_projected, projected
from tests.runtime.kernels.operands import DTYPES, TOLERANCE, relative_error
from tests.support.recorders import DEVICE

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_strip = pytest.mark.parametrize("strip", [*STRIPS, Strip(16, 16)], ids=str)
DIM = 72
"""Channels, which no strip divides."""


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def wide(*given: Tensor) -> list[Tensor]:
    return [one.float() for one in given]


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert relative_error(found, expected) < TOLERANCE[found.dtype]


@every_dtype
@every_strip
@pytest.mark.parametrize("columns", [(48,), (33, 7), (40, 16, 16)], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_weights_that_multiply_the_same_rows_are_side_by_side(
    columns: tuple[int, ...], biased: bool, strip: Strip, dtype: torch.dtype
) -> None:
    x, weights = random(2, 3, DIM, dtype=dtype), [random(count, DIM, dtype=dtype) for count in columns]
    biases = [random(count, dtype=dtype) for count in columns] if biased else None
    expected = torch.cat([functional.linear(*wide(x, weight)) for weight in weights], -1)
    if biases is not None:
        expected += torch.cat(biases).float()
    assert_close(projected(x, weights, biases, strip=strip), expected)


@every_strip
@pytest.mark.parametrize("dtype", [one for one in DTYPES if one is not torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.001, 1.0, 300.0])
def test_rows_are_normalised_before(scale: float, strip: Strip, dtype: torch.dtype) -> None:
    """As they are by a kernel of their own, whatever their size: the smallest is less than what is added to it."""
    x, weight = scale * random(1, 3, DIM, dtype=dtype), random(DIM, dtype=dtype)
    first, second = random(40, DIM, dtype=dtype), random(40, DIM, dtype=dtype)
    norm, rows = Norm(weight, 1e-5, 1.0), normalized(x.float(), Norm(weight.float(), 1e-5, 1.0))
    expected = [functional.linear(rows, one.float()) for one in (first, second)]
    assert_close(projected(x, [first, second], norm=norm, strip=strip), torch.cat(expected, -1))
    gated = gate_projected(x, first, second, "silu", norm=norm, strip=strip)
    assert_close(gated, functional.silu(expected[0]) * expected[1])


@every_dtype
@every_strip
def test_what_was_there_before_is_added_after(strip: Strip, dtype: torch.dtype) -> None:
    x, weight, residual = (random(*shape, dtype=dtype) for shape in ((5, 1, DIM), (33, DIM), (5, 1, 33)))
    expected = functional.linear(*wide(x, weight)) + residual.float()
    assert_close(projected(x, [weight], residual=residual, strip=strip), expected)


@every_dtype
@every_strip
def test_gates_are_opened(strip: Strip, dtype: torch.dtype) -> None:
    x, gates, values = (random(*shape, dtype=dtype) for shape in ((16, DIM), (35, DIM), (35, DIM)))
    gate, value = (functional.linear(*wide(x, one)) for one in (gates, values))
    for activation, opened in (
        ("silu", functional.silu(gate)),
        ("gelu_tanh", functional.gelu(gate, approximate="tanh")),
    ):
        assert_close(gate_projected(x, gates, values, activation, strip=strip), opened * value)


def test_rows_do_not_see_what_lies_beside_them() -> None:
    """Neither what is beyond the last row nor what a view leaves out."""
    x = torch.full((4, 2, DIM), torch.nan, device=DEVICE)
    x[1:3, :1] = random(2, 1, DIM, dtype=torch.float32)
    weight = random(33, DIM, dtype=torch.float32)
    rows = x[1:3, :1]
    assert_close(projected(rows, [weight]), functional.linear(rows, weight))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(2, DIM, device=DEVICE), torch.zeros(8, DIM, device=DEVICE)
    half = x.half(), weight.half()
    for reason, call in (
        ("one to 3 weights", lambda: projected(x, [])),
        ("one to 3 weights", lambda: projected(x, [weight] * 4)),
        ("one to 16 rows", lambda: projected(x.repeat(9, 1), [weight])),
        (r"a weight must be \[columns, 72\]", lambda: projected(x, [weight[:, :8]])),
        ("side by side", lambda: projected(x[:, :8], [weight[:, :8]])),
        (r"biases must be \[8\] long", lambda: projected(x, [weight], [x[0]])),
        (r"a residual must be \(2, 8\)", lambda: projected(x, [weight], residual=x)),
        ("rows of torch.float32 on", lambda: projected(x, [weight.half()])),
        ("are not normalised here", lambda: projected(half[0], [half[1]], norm=Norm(half[0][0], 1e-5))),
        ("do not fit values", lambda: gate_projected(x, weight, weight[:4], "silu")),
    ):
        with pytest.raises(ValueError, match=reason):
            call()
