"""A view of a model with fewer kernels computes what the model does, for every family; nothing of the model changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel
from tests.support.families import build_model
from tests.support.recorders import DEVICE

pytest.importorskip("triton")

from qcfuse_rag.runtime.fused_layers.fused_modules import FewRowProduct, FusedGate, FusedNorm, fused_view

IDS = torch.tensor([[5, 9, 200, 3, 77]], device=DEVICE)
LAYERS = 4
EVERYTHING = {"norms": 2 * LAYERS + 1, "gates": LAYERS, "rotations": LAYERS}
LATENT = ("deepseek3-latent", "glm4-moe-lite-latent", "minicpm3-latent", "youtu-latent")
FOUND = {
    "afmoe": {**EVERYTHING, "norms": 6 * LAYERS + 1},
    "cohere2-interleaved": {"gates": LAYERS},
    "axk1-latent": {**EVERYTHING, "norms": 5 * LAYERS},
    "deepseek2-latent": {"norms": 3 * LAYERS + 1, "gates": LAYERS},
    **{family: {**EVERYTHING, "norms": 4 * LAYERS + 1} for family in LATENT},
    "llama4-chunked": {"norms": 2 * LAYERS + 1},
    "gemma2-softcap": {**EVERYTHING, "norms": 4 * LAYERS + 1},
    "gemma3-two-ropes": {**EVERYTHING, "norms": 6 * LAYERS + 1},
    "gemma3n-shared-keys": {"norms": 62, "gates": 7},
    "gemma4-shared-keys": {"norms": 48, "gates": 7},
    "gpt-oss-sinks": {"norms": 2 * LAYERS + 1},
    "gpt-neox": {"rotations": LAYERS},
    "phi3-partial-rotary": {"norms": 2 * LAYERS + 1, "rotations": LAYERS},
    "qwen3-qk-norm": {**EVERYTHING, "norms": 4 * LAYERS + 1},
    "starcoder2": {"rotations": LAYERS},
    "qwen3.5-gated-delta": {"norms": 13, "gates": 4, "rotations": 2},
    "qwen3-next-gated-delta": {"norms": 13, "gates": 4, "rotations": 2},
    "olmo-gated-delta": {"norms": 13, "gates": 4, "rotations": 2},
    "lfm2-convolution": {"norms": 13, "rotations": 2},
    "lfm3-convolution": {"norms": 21, "rotations": 2},
    "bamba-mamba-2": {"norms": 9, "gates": 4, "rotations": 2},
    "granite-mamba-2": {"norms": 9, "rotations": 2},
    "jamba-mamba": {"norms": 15, "gates": 2},
}
"""Where it is not everything: other norms, interleaved or no gates, a rotation of neighbouring channels."""


WITHOUT_PROJECTIONS = {"gpt-neox", "phi3-partial-rotary", "axk1-latent", "deepseek2-latent", *LATENT}
"""Models with one matrix for queries, keys and values, or with latents."""
WITHOUT_OUTPUT = {"gpt-neox", "lfm2-convolution"}
"""Models that name an attention's last product otherwise."""


RECURRENT = {name for name in FOUND if name.endswith(("delta", "convolution", "mamba", "mamba-2"))} - {
    "olmo-gated-delta"
}
"""Models of which two layers have products of attention by its usual names; OLMo's mixers have such names too."""


def expected_views(family: str, dtype: torch.dtype) -> dict[str, int]:
    """Return how many modules of each kind have a view."""
    return {**FOUND.get(family, EVERYTHING), **expected_products(family, dtype)}


def expected_products(family: str, dtype: torch.dtype) -> dict[str, int]:
    """Return how many products have a view; the interpreter cannot multiply bfloat16 matrices."""
    joint = dtype == torch.float16 or (dtype == torch.bfloat16 and DEVICE.type == "cuda")
    layers = 2 if family in RECURRENT else LAYERS
    projections = {"projections": layers} if joint and family not in WITHOUT_PROJECTIONS else {}
    outputs = {"outputs": 7 if "shared-keys" in family else layers} if joint and family not in WITHOUT_OUTPUT else {}
    return {**projections, **outputs}


def replaced(view: nn.Module) -> dict[str, int]:
    """Return how many modules of each kind are another's stand-in."""
    kinds = {FusedNorm: "norms", FusedGate: "gates", FewRowProduct: "projections"}
    stand_ins = {
        name: part
        for name, part in view.named_modules()
        if isinstance(part, FewRowProduct) or type(part).__name__.startswith("Fused")
    }
    names = Counter(
        "outputs" if name.endswith("o_proj") else kinds.get(type(part), "rotations") for name, part in stand_ins.items()
    )
    return {name: count // (3 if name == "projections" else 1) for name, count in names.items()}


def module_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes of each module."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


@torch.inference_mode()
def test_a_fused_view_computes_what_the_model_does(family_name: str) -> None:
    model = build_model(family_name).to(DEVICE)
    expected, attributes = model(IDS).logits, module_attributes(model)
    view = fused_view(model)
    assert replaced(view) == expected_views(family_name, torch.float32)
    assert torch.allclose(view(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert set(map(id, view.parameters())) == set(map(id, model.parameters())), "no copies"
    assert module_attributes(model) == attributes, "of the model nothing changes"
    for dtype in (torch.float16, torch.bfloat16):
        assert replaced(fused_view(model.to(dtype))) == expected_views(family_name, dtype)
    found, own = fused_view(model.half())(IDS).logits, model(IDS).logits
    assert float((found - own).norm() / own.norm()) < 1e-2, "five rows, by products of a few rows"


@torch.inference_mode()
def test_what_comes_out_otherwise_stays_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from qcfuse_rag.runtime.fused_layers import pointwise

    def off(compute: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*given: Any) -> Any:
            found = compute(*given)
            return found * 1.05 if isinstance(found, Tensor) else (found[0], found[1] * 1.05)

        return wrong

    def refused(*given: Any) -> None:
        raise RuntimeError("does not compile here")

    model = build_model("llama").to(DEVICE)
    for spoiled in (off, lambda compute: refused):
        for name in ("normalized", "rotated", "gated"):
            monkeypatch.setattr(pointwise, name, spoiled(getattr(pointwise, name)))
        assert fused_view(model) is model
        monkeypatch.undo()


@torch.inference_mode()
def test_what_somebody_has_changed_is_left_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    """Libraries that spread a model over devices put other functions in place of its modules' own."""
    model = build_model("llama").to(DEVICE)
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda hidden, own=norm.forward: 2 * own(hidden)
    lm = LanguageModel.wrap(model, tokenizer)
    view = fused_view(lm.model)
    assert replaced(view) == {"norms": 2 * LAYERS, "gates": LAYERS, "rotations": LAYERS}, "one is somebody else's"
    hooked = model.model.layers[1].mlp.register_forward_hook(lambda module, given, found: 0 * found)
    view = fused_view(lm.model)
    assert replaced(view) == {"norms": 2 * LAYERS, "gates": LAYERS - 1, "rotations": LAYERS}
    assert torch.allclose(view(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    hooked.remove()
    assert torch.allclose(view(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_what_differs_for_some_numbers_only_is_told_apart() -> None:
    """A norm that takes the mean away, which is little of many channels, and a gate that is cut off."""

    class Centred(nn.LayerNorm):
        variance_epsilon = 1e-5

    class CutOff(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, hidden: Tensor) -> Tensor:
            found: Tensor = self.down_proj(
                nn.functional.silu(self.gate_proj(hidden)).clamp(max=7) * self.up_proj(hidden)
            )
            return found

    model = build_model("llama")
    model.model.norm, model.model.layers[0].mlp = Centred(4096), CutOff()
    for dtype in (torch.float32, torch.bfloat16):
        changed = model.to(DEVICE, dtype)
        view = fused_view(changed)
        assert view.model.norm is changed.model.norm
        assert view.model.layers[0].mlp is changed.model.layers[0].mlp
        others = {"norms": 2 * LAYERS, "gates": LAYERS - 1, "rotations": LAYERS}
        assert replaced(view) == {**others, **expected_products("llama", dtype)}


@torch.inference_mode()
def test_a_stand_in_answers_for_what_it_stands_for() -> None:
    """Models ask a norm for its weight, and call modules with more, or by name; the model's own are asked then."""
    model = build_model("llama").to(DEVICE)
    view = fused_view(model)
    own, norm, gate = model.model.norm, view.model.norm, view.model.layers[0].mlp
    assert norm.weight is own.weight
    assert gate.up_proj is model.model.layers[0].mlp.up_proj
    given = torch.randn(1, 2, 48, device=DEVICE)
    assert torch.equal(norm(hidden_states=given), own(given))
    assert torch.equal(gate(x=given), model.model.layers[0].mlp(given))


def test_of_a_module_used_twice_there_is_one_view() -> None:
    model = build_model("llama").to(DEVICE)
    model.model.layers[1] = model.model.layers[0]
    layers = fused_view(model).model.layers
    assert layers[1] is layers[0]
    assert layers[1] is not model.model.layers[0]


def test_what_cannot_be_looked_at_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama").to(DEVICE)
    monkeypatch.setattr(nn.Module, "named_parameters", property(lambda self: 1 / 0))
    assert fused_view(model) is model
