"""Products of a few rows by one kernel against the modules they replace: in the interpreter, or on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("triton")

from qcfuse_rag.models.quantized_weights import FORMATS
from qcfuse_rag.runtime.fused_layers import skinny_products
from qcfuse_rag.runtime.fused_layers.fused_modules import few_row_products
from qcfuse_rag.runtime.fused_layers.pointwise import ACTIVATIONS
from qcfuse_rag.runtime.fused_layers.skinny_products import MAX_ROWS, gate_projected, projected, supports
from tests.support.recorders import DEVICE

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-2}
HERE = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
"""A dtype whose matrices can be multiplied here: the interpreter's cannot be bfloat16."""
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE if DEVICE.type == "cuda" else [HERE], ids=str)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def weight(columns: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(columns, channels, device=DEVICE) / channels**0.5).to(dtype)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 200), (1, 5, 200), (3, 1, 264), (1, MAX_ROWS, 72)], ids=str)
@pytest.mark.parametrize("columns", [(64, 40, 40), (33, 7), (50,)], ids=str)
def test_rows_are_multiplied_with_each_weight(
    columns: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """None of the sizes is a multiple of a block."""
    x = torch.randn(shape, device=DEVICE).to(dtype)
    weights = [weight(count, shape[-1], dtype) for count in columns]
    biases = [torch.randn(count, device=DEVICE).to(dtype) for count in columns]
    for added in (None, biases):
        found = projected(x, weights, added)
        for result, own, bias in zip(found, weights, added or [None] * len(weights), strict=True):
            assert error(result, functional.linear(x, own, bias)) < TOLERANCE[dtype]
            assert result.is_contiguous()


@torch.inference_mode()
@pytest.mark.parametrize("n_rows", [1, 17])
def test_weights_of_one_byte_are_multiplied_as_the_library_does(n_rows: int) -> None:
    pytest.importorskip("torchao")
    layers = [nn.Linear(264, columns, bias=False).to(DEVICE, HERE) for columns in (64, 64, 40)]
    layers = [FORMATS["int8_weight_only"].quantize(layer, DEVICE) for layer in layers]  # type: ignore[misc]
    x, own = torch.randn(1, n_rows, 264, device=DEVICE).to(HERE), [layer.weight for layer in layers]
    assert supports(x, own)
    for result, layer in zip(projected(x, own), layers, strict=True):
        assert error(result, layer(x)) < TOLERANCE[torch.bfloat16]
    expected = functional.silu(layers[0](x).float()) * layers[1](x).float()
    assert error(gate_projected(x, *own[:2], "silu"), expected.to(HERE)) < TOLERANCE[torch.bfloat16]
    assert not supports(x, [own[0], torch.zeros(64, 264, device=DEVICE, dtype=HERE)]), "one kernel, one format"


@every_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n_rows", [1, 17])
def test_gates_and_values_are_multiplied_together(n_rows: int, activation: str, dtype: torch.dtype) -> None:
    x = 3 * torch.randn(1, n_rows, 136, device=DEVICE).to(dtype)
    gates, values = weight(70, 136, dtype), weight(70, 136, dtype)
    opened = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}[activation]
    expected = (opened(functional.linear(x.float(), gates.float())) * functional.linear(x.float(), values.float())).to(
        dtype
    )
    assert error(gate_projected(x, gates, values, activation), expected) < TOLERANCE[dtype]


def test_other_rows_and_weights_are_left_to_the_library() -> None:
    few, own = torch.zeros(MAX_ROWS, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert supports(few, [own, own])
    assert supports(few[None, :1], [own])
    assert not supports(torch.zeros(MAX_ROWS + 1, 64, dtype=torch.bfloat16), [own])
    assert not supports(few[:0], [own])
    assert not supports(few.float(), [own.float()]), "matrix units are for half precision"
    assert not supports(few, [own, own.half()])
    assert not supports(few, [own[:, :32]])
    assert not supports(few, [torch.zeros(64, 32, dtype=torch.bfloat16).T])


@torch.inference_mode()
def test_projections_of_the_same_rows_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each set of rows has its own products, whichever was multiplied last."""
    linears = [nn.Linear(72, count).to(DEVICE, HERE) for count in (64, 24, 24)]
    launches = list[int]()

    def counted(x: torch.Tensor, *rest: object) -> list[torch.Tensor]:
        launches.append(len(x))
        return projected(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(skinny_products, "projected", counted)
    parts = few_row_products(linears)
    first, second, many = (torch.randn(n, 72, device=DEVICE).to(HERE) for n in (3, 3, MAX_ROWS + 1))
    for rows in (first, second, first):
        for part, own in zip(parts, linears, strict=True):
            assert error(part(rows), own(rows)) < TOLERANCE[HERE]
    assert launches == [3, 3, 3]
    assert error(parts[0](first), linears[0](first)) < TOLERANCE[HERE]
    assert error(parts[1](second), linears[1](second)) < TOLERANCE[HERE], "not the first rows' product"
    assert torch.equal(parts[2](many), linears[2](many))
    assert len(launches) == 5
