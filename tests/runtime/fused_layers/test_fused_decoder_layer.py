"""Layers of eight kernels compute the steps that a model's own do, for every family; nothing of the model changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.decode_step import forward_plan, forward_step
from qcfuse_rag.runtime.kv_table import KVTable
from qcfuse_rag.runtime.table_plan import TablePlan
from tests.support.families import build_model
from tests.support.recorders import DEVICE

pytest.importorskip("triton")

from qcfuse_rag.runtime.fused_layers import product
from qcfuse_rag.runtime.fused_layers.fused_decoder_layer import LeanLayer, leanest_steps
from qcfuse_rag.runtime.fused_layers.pointwise import Norm
from qcfuse_rag.runtime.fused_layers.product import MOST_ROWS, STRIPS, Strip

LAYERS = 4
OTHER_FORMS = {
    "afmoe",
    "cohere2-interleaved",
    "gemma2-softcap",
    "gemma3-two-ropes",
    "gpt-oss-sinks",
    "gpt-neox",
    "granite-multipliers",
    "phi3-partial-rotary",
    "qwen2-moe-silent-window",
    "starcoder2",
}
"""Norms behind as well, other norms, multipliers of what is added, experts, weights that lie in one already."""
FOUND = {**dict.fromkeys(OTHER_FORMS, 0), "smollm3-nope": LAYERS // 2}
"""Where it is not all layers: every other one of SmolLM3's does not rotate."""


def wrapped(family: str, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return LanguageModel.wrap(build_model(family).to(DEVICE), tokenizer)


def leanest(lm: LanguageModel) -> PreTrainedModel:
    return next(iter(leanest_steps(lm.model).values()))


def lean_layers(view: nn.Module) -> int:
    return sum(isinstance(one, LeanLayer) for one in view.modules())


def assert_steps_alike(lm: LanguageModel, view: nn.Module) -> None:
    """Two requests of different lengths, each with keys and values of its own."""
    tokens, positions = [7, 200], [40, 23]
    theirs = [KVBuffer.allocate(lm.shapes, 50, dtype=lm.dtype, device=DEVICE) for _ in tokens]
    for held in (held for buffer in theirs for held in (*buffer.keys, *buffer.values)):
        held.normal_()
    ours = [KVBuffer(*(tuple(one.clone() for one in side) for side in (one.keys, one.values))) for one in theirs]
    rows = torch.tensor(positions, device=DEVICE)[:, None]
    plan = TablePlan(rows, KVTable.of(ours, lm.shapes, 50), lm.sliding)
    found = forward_plan(view, torch.tensor(tokens, device=DEVICE), plan)
    assert torch.allclose(found, forward_step(lm, tokens, positions, theirs), rtol=1e-4, atol=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        pairs = zip((*mine.keys, *mine.values), (*other.keys, *other.values), strict=True)
        assert all(torch.allclose(one, two, rtol=1e-4, atol=1e-4) for one, two in pairs)


@torch.inference_mode()
def test_steps_of_a_view_are_the_models(family_name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = wrapped(family_name, tokenizer)
    before = {name: dict(vars(one)) for name, one in lm.model.named_modules()}
    views = list(leanest_steps(lm.model).values())
    expected = FOUND.get(family_name, LAYERS)
    assert [lean_layers(view) for view in views if lean_layers(view)] == ([expected] * len(STRIPS) if expected else [])
    assert views[-1] is lm.model
    assert {name: dict(vars(one)) for name, one in lm.model.named_modules()} == before, "of the model nothing changes"
    strips = len(STRIPS) if family_name == "qwen3-qk-norm" else 1  # the interpreter is slow
    for view in views[: strips if expected else 0]:
        assert {id(one) for one in view.parameters()} == {id(one) for one in lm.model.parameters()}, "no copies"
        assert_steps_alike(lm, view)


@torch.inference_mode()
def test_more_rows_than_a_product_takes_are_computed_as_ever(tokenizer: PreTrainedTokenizerFast) -> None:
    """And rows that no plan says the place of."""
    lm = wrapped("llama", tokenizer)
    view = leanest(lm)
    for count in (5, MOST_ROWS + 1):
        ids = torch.arange(5, 5 + count, device=DEVICE)[None]
        assert torch.allclose(view(ids).logits, lm.model(ids).logits, rtol=1e-4, atol=1e-4)


def in_torch(monkeypatch: pytest.MonkeyPatch, off: str | None = None) -> None:
    """Have torch multiply, rounding as the kernels do: the interpreter cannot multiply bfloat16.

    Args:
        monkeypatch: until when.
        off: which product comes out 5 % too large.
    """

    def rows(x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        wide = x.float()
        if norm is None:
            return wide, torch.ones(())
        scale = (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        return (wide * (norm.weight.float() + norm.offset)).to(x.dtype).float(), scale

    def projected(
        x: Tensor, weights: list[Tensor], biases: Any = None, *, norm: Any = None, residual: Any = None, strip: Strip
    ) -> Tensor:
        given, scale = rows(x, norm)
        found = torch.cat([functional.linear(given, weight.float()) for weight in weights], -1) * scale
        found = found + (0 if biases is None else torch.cat(biases).float())
        found *= 1.05 if off == {3: "asking", 1: "back"}[len(weights)] else 1
        return (found + (0 if residual is None else residual.float())).to(x.dtype)

    def gate_projected(x: Tensor, gates: Tensor, values: Tensor, activation: str, *, norm: Any, strip: Strip) -> Tensor:
        given, scale = rows(x, norm)
        gate, value = (functional.linear(given, one.float()) * scale for one in (gates, values))
        return (functional.silu(gate) * value * (1.05 if off == "gates" else 1)).to(x.dtype)

    monkeypatch.setattr(product, "projected", projected)
    monkeypatch.setattr(product, "gate_projected", gate_projected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2-bias", "qwen3-qk-norm"])
@pytest.mark.parametrize("off", [None, "asking", "back", "gates"])
def test_layers_that_come_out_otherwise_stay_as_they_are(
    off: str | None,
    family: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever part of them does: rows much smaller than what a layer adds show it, rounding does not hide it."""
    model = build_model(family).to(DEVICE, dtype)
    for layer in model.get_decoder().layers:
        layer.input_layernorm.weight.data *= 0.2  # as in trained models it may be
    lm = LanguageModel.wrap(model, tokenizer)
    in_torch(monkeypatch, off)
    expected = [LAYERS] * len(STRIPS) if off is None else []
    assert [lean_layers(view) for view in leanest_steps(lm.model).values() if lean_layers(view)] == expected


def test_a_multiplier_of_what_is_added_is_noticed(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model("granite-multipliers").to(DEVICE, torch.bfloat16)
    for layer in model.get_decoder().layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data *= 0.05  # what is added is little beside most rows
    in_torch(monkeypatch)
    assert [lean_layers(view) for view in leanest_steps(LanguageModel.wrap(model, tokenizer).model).values()] == [0, 0]


def test_layers_that_do_not_compile_stay_as_they_are(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any, **how: Any) -> Tensor:
        raise RuntimeError("does not compile here")

    monkeypatch.setattr(product, "gate_projected", refused)
    assert [lean_layers(view) for view in leanest_steps(wrapped("llama", tokenizer).model).values()] == [0, 0]


class Adapted(nn.Linear):
    """Stands for what libraries put in a product's place."""


def hooked(layer: Any) -> None:
    layer.register_forward_hook(lambda module, given, found: found)


def attention_hooked(layer: Any) -> None:
    hooked(layer.self_attn)


def product_hooked(layer: Any) -> None:
    hooked(layer.mlp.down_proj)


def attention_replaced(layer: Any) -> None:
    own = layer.self_attn.forward
    layer.self_attn.forward = lambda *given, **how: own(*given, **how)


def product_adapted(layer: Any) -> None:
    layer.self_attn.v_proj.__class__ = Adapted


def output_cut_off(layer: Any) -> None:
    class CutOff(type(layer)):  # type: ignore[misc]
        def forward(self, *given: Any, **how: Any) -> Any:
            return super().forward(*given, **how).clamp(-1e4, 1e4)

    layer.__class__ = CutOff


def part_added(layer: Any) -> None:
    layer.add_module("dropout", nn.Identity())


def gates_biased(layer: Any) -> None:
    layer.mlp.gate_proj.bias = nn.Parameter(torch.ones_like(layer.mlp.gate_proj.weight[:, 0]))


def values_biased(layer: Any) -> None:
    layer.self_attn.v_proj.bias = nn.Parameter(torch.ones_like(layer.self_attn.v_proj.weight[:, 0]))


@pytest.mark.parametrize(
    "change",
    [
        hooked,
        attention_hooked,
        product_hooked,
        attention_replaced,
        product_adapted,
        output_cut_off,
        part_added,
        gates_biased,
        values_biased,
    ],
)
@torch.inference_mode()
def test_layers_that_somebody_has_changed_are_left_alone(
    change: Callable[[Any], None], tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = wrapped("llama", tokenizer)
    change(lm.model.get_decoder().layers[1])
    view = leanest(lm)
    assert lean_layers(view) == LAYERS - 1
    assert_steps_alike(lm, view)


def test_weights_that_stand_for_others_are_left_to_those_who_know(tokenizer: PreTrainedTokenizerFast) -> None:
    """As libraries have weights that are kept in fewer bits: there is nothing where a kernel would read them."""
    lm = wrapped("llama", tokenizer)
    product = lm.model.get_decoder().layers[1].mlp.down_proj
    product.weight = nn.Parameter(TwoTensor(product.weight.data, product.weight.data))
    assert lean_layers(leanest(lm)) == LAYERS - 1


@torch.inference_mode()
def test_without_room_in_float16_layers_stay_as_they_are(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = LanguageModel.wrap(build_model("llama").to(DEVICE, torch.float16), tokenizer)
    assert [lean_layers(view) for view in leanest_steps(lm.model).values()] == [0, 0]


def test_a_layer_that_cannot_be_looked_at_is_left_as_it_is(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are not."""
    lm = wrapped("llama", tokenizer)
    del lm.model.get_decoder().layers[1].self_attn.config
    assert lean_layers(leanest(lm)) == LAYERS - 1


@torch.inference_mode()
def test_hooks_that_hand_out_hidden_states_change_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    """transformers leaves them in place once somebody has asked for hidden states."""
    lm = wrapped("llama", tokenizer)
    lm.model(torch.tensor([[5, 9]], device=DEVICE), output_hidden_states=True)
    assert lm.model.get_decoder().layers[0]._forward_hooks
    assert lean_layers(leanest(lm)) == LAYERS
