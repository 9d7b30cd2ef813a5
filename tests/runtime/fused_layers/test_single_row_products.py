"""A view for CPUs with bfloat16 computes what the model does, for every family; nothing of the model changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from qcfuse_rag.runtime import language_model
from qcfuse_rag.runtime.fused_layers.fused_modules import SingleRowProduct, single_row_view
from qcfuse_rag.verification.exactness import measure_exactness
from tests.support.cases import cases
from tests.support.families import FAMILIES, build_model

every_family = pytest.mark.parametrize("family", cases(sorted(FAMILIES), "llama"))


def products(model: nn.Module) -> int:
    return sum(isinstance(module, SingleRowProduct) for module in model.modules())


@torch.inference_mode()
@every_family
def test_rows_are_near_to_those_of_the_model(family: str) -> None:
    model = build_model(family).bfloat16()
    model.set_attn_implementation("eager")
    linears = sum(type(module) is nn.Linear for module in model.modules())
    view = single_row_view(model)
    assert products(view) == linears > 0
    assert products(model) == 0
    for n_rows in (1, 5):
        ids = torch.arange(n_rows)[None] + 7
        expected, result = model(input_ids=ids).logits.float(), view(input_ids=ids).logits.float()
        assert torch.equal(expected, result) or n_rows == 1
        assert (expected - result).abs().max() < 0.03 * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96), (2, 96), (1, 0, 96)])
def test_products_have_the_shape_and_dtype_of_the_layers(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(96, 40, bias=bias)).bfloat16()
    x = torch.randn(shape).bfloat16()
    expected, result = layer(x), single_row_view(layer)(x)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.allclose(result.float(), expected.float(), rtol=0.01, atol=0.01)


class Packed(torch.Tensor):
    """A weight in a format of another library."""


def test_other_layers_stay_as_they_are() -> None:
    hooked = nn.Linear(8, 8).bfloat16()
    hooked.register_forward_hook(lambda *_: None)
    packed = nn.Linear(8, 8).bfloat16()
    packed.weight = nn.Parameter(packed.weight.data.as_subclass(Packed))
    module = nn.Sequential(nn.Linear(8, 8), hooked, packed, nn.Sequential(nn.Linear(8, 8).bfloat16()))
    view = single_row_view(module)
    assert list(view)[:3] == list(module)[:3]
    assert products(view) == 1


@pytest.mark.parametrize("supported", [True, False])
def test_processors_that_multiply_bfloat16_use_the_view(
    supported: bool, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "multiplies_bfloat16", lambda: supported)
    lm = LanguageModel.wrap(build_model("llama").bfloat16(), tokenizer)
    assert (products(lm.fused_model) > 0) is supported
    assert measure_exactness(lm).passed
    plain = LanguageModel.wrap(build_model("llama"), tokenizer)
    assert plain.fused_model is plain.model
