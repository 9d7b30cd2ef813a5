"""Layers of eight kernels compute the steps that a model's own do, for every family; nothing of the model changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.kv_table import KVTable
from qcfuse_rag.fuse.step import forward_plan, forward_step
from qcfuse_rag.fuse.table_plan import TablePlan
from tests.families import FAMILIES, build_model
from tests.recorders import DEVICE

pytest.importorskip("triton")

from qcfuse_rag.fuse.kernels import product
from qcfuse_rag.fuse.kernels.product import MOST_ROWS, STRIPS
from qcfuse_rag.fuse.lean_layer import LeanLayer, leanest_steps

LAYERS = 4
OTHER_FORMS = {
    "cohere2-interleaved",
    "gemma2-softcap",
    "gemma3-two-ropes",
    "gpt-oss-sinks",
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


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_steps_of_a_view_are_the_models(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = wrapped(family, tokenizer)
    before = {name: dict(vars(one)) for name, one in lm.model.named_modules()}
    views = list(leanest_steps(lm.model).values())
    expected = FOUND.get(family, LAYERS)
    assert [lean_layers(view) for view in views if lean_layers(view)] == ([expected] * len(STRIPS) if expected else [])
    assert views[-1] is lm.model
    assert {name: dict(vars(one)) for name, one in lm.model.named_modules()} == before, "of the model nothing changes"
    for view in views[: len(STRIPS) if expected else 0]:
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


@pytest.mark.parametrize("name", ["projected", "gate_projected"])
def test_layers_that_come_out_otherwise_stay_as_they_are(
    name: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, compute = wrapped("llama", tokenizer), getattr(product, name)

    def off(*given: Any, **how: Any) -> Tensor:
        return compute(*given, **how) * 1.05  # type: ignore[no-any-return]

    def refused(*given: Any, **how: Any) -> Tensor:
        raise RuntimeError("does not compile here")

    for spoiled in (off, refused):
        monkeypatch.setattr(product, name, spoiled)
        assert [lean_layers(view) for view in leanest_steps(lm.model).values()] == [0, 0]


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


@torch.inference_mode()
def test_without_room_in_float16_layers_stay_as_they_are(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = LanguageModel.wrap(build_model("llama").to(DEVICE, torch.float16), tokenizer)
    assert [lean_layers(view) for view in leanest_steps(lm.model).values()] == [0, 0]


def test_what_cannot_be_looked_at_is_left_as_it_is(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: PreTrainedModel = wrapped("llama", tokenizer).model
    monkeypatch.setattr("qcfuse_rag.fuse.lean_layer._leaner", lambda *given: 1 / 0)
    assert [lean_layers(view) for view in leanest_steps(model).values()] == [0, 0]
