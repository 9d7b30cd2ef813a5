"""Linear layers whose weights oneDNN has packed compute what they did; a loaded model has them on CPUs that gain."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from qcfuse_rag.models.cpu_weights import PackedLinear, multiplies, pack_linears
from qcfuse_rag.models.load import load_model
from tests.support import seams
from tests.support.cases import cases
from tests.support.families import FAMILIES, build_model

pytestmark = pytest.mark.skipif(not multiplies("float32"), reason="this CPU multiplies no packed weights")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
DTYPES = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not multiplies("bfloat16"), reason="no bfloat16 products")),
]


def packed(model: nn.Module) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", cases(sorted(FAMILIES), "llama"))
def test_logits_are_those_of_the_model(family: str, dtype: torch.dtype) -> None:
    model, ids = build_model(family).to(dtype), torch.arange(5)[None] + 7
    linears = sum(type(module) is nn.Linear for module in model.modules())
    expected = model(input_ids=ids).logits
    pack_linears(model)
    assert packed(model) == linears > 0
    assert (model(input_ids=ids).logits - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(96,), (1, 96), (2, 3, 96), (1, 0, 96)])
def test_products_have_the_shape_and_dtype_of_the_layers(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 40, bias=bias, dtype=dtype), torch.randn(shape, dtype=dtype)
    expected, result = layer(x), PackedLinear(layer)(x)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.allclose(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_gradients_and_other_dtypes_take_the_same_weights() -> None:
    layer, x = nn.Linear(96, 40, bias=False), torch.randn(2, 96, requires_grad=True)
    packed_layer = PackedLinear(layer)
    assert torch.equal(packed_layer.state_dict()["weight"], layer.weight)
    expected, result = (torch.autograd.grad(module(x).square().sum(), x)[0] for module in (layer, packed_layer))
    assert torch.equal(result, expected)
    assert torch.equal(packed_layer(x.detach().double()), layer.double()(x.detach().double()))


def test_a_deep_copy_computes_the_same_and_has_a_bias_of_its_own() -> None:
    model, x = nn.Sequential(PackedLinear(nn.Linear(96, 40))), torch.randn(2, 96)
    other = copy.deepcopy(model)
    assert torch.equal(other(x), model(x))
    other.requires_grad_(False)[0].bias.add_(1)
    assert torch.allclose(other(x), model(x) + 1)


class Quantized(torch.Tensor):
    """A weight in a format of another library."""


def test_other_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.torch_refuses(monkeypatch, "bfloat16")
    quantized = nn.Linear(8, 8)
    quantized.weight = nn.Parameter(quantized.weight.data.as_subclass(Quantized))
    model = nn.Sequential(quantized, nn.Linear(8, 8).bfloat16(), nn.Embedding(8, 8), nn.Sequential(nn.Linear(8, 8)))
    others = list(model)[:3]
    pack_linears(model)
    assert list(model)[:3] == others
    assert packed(model) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_is_packed_unless_torch_refuses_its_dtype(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    assert (packed(load_model(model_folder, device="cpu", dtype=dtype).model) > 0) is multiplies(dtype)
    seams.torch_refuses(monkeypatch, dtype)
    assert packed(load_model(model_folder, device="cpu", dtype=dtype).model) == 0
