"""A view of a model whose layers take eight kernels a decode step, most of which do nothing but read weights.

For layers of the form that Llama, Mistral and Qwen share: a norm, attention and what was before, a norm, a gated
network and what was before. Each is compared with the model's own layer before, see
`runtime.fused_layers.layer_check`; layers of another form stay as `runtime.fused_layers.fused_modules` has them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qcfuse_rag.runtime.attention.dispatch import ATTENTION_NAME, rows_attention
from qcfuse_rag.runtime.fused_layers.fused_modules import LeanGate, LeanNorm, changed, leanest_first
from qcfuse_rag.runtime.fused_layers.layer_check import INTERFACES, LayerCheck
from qcfuse_rag.runtime.model_views import ModuleProxy, with_module

if TYPE_CHECKING:
    from qcfuse_rag.runtime.fused_layers.product import Strip

PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""What transformers' models call the parts of a layer of this form."""
QKV = ("q_proj", "k_proj", "v_proj")
HEAD_NORMS = ("q_norm", "k_norm")
CUT_OFF = {"clamp", "clamp_", "clip", "clip_"}
"""What random numbers might not be large enough to show."""

LOG = logging.getLogger(__name__)


class LeanLayer(ModuleProxy):
    """A decoder layer that computes a few rows in eight kernels, and more as the layer inside does.

    Args:
        inner: the layer, in a lean view.
        strip: what a program of its products takes.
        how: by what its attention attends besides what is handed through; found when the layer was compared, and the
            same from then on.
        attend: the function that attends.
    """

    def __init__(
        self, inner: nn.Module, strip: Strip, how: dict[str, Any], attend: Callable[..., Any] = rows_attention
    ) -> None:
        super().__init__(inner)
        self._strip, self._how, self._attend = strip, how, attend

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """Compute what the layer does.

        Args:
            hidden_states: `[B, R, H]`.
            **kwargs: what decoders of transformers give their layers.
        """
        from qcfuse_rag.runtime.fused_layers.pointwise import rotated
        from qcfuse_rag.runtime.fused_layers.product import MOST_ROWS, gate_projected, projected

        requests, n_rows, _ = hidden_states.shape
        if kwargs.get("fusion") is None or requests * n_rows > MOST_ROWS:
            return self.inner(hidden_states, **kwargs)
        attention, dim = self.self_attn, int(self.self_attn.head_dim)
        cos, sin = kwargs["position_embeddings"]
        turned = cos.shape == sin.shape and cos.shape[-2:] == (n_rows, dim) and cos.dtype == hidden_states.dtype
        if not turned or cos.dim() != 3 or len(cos) not in (1, requests):
            return self.inner(hidden_states, **kwargs)
        found = projected(hidden_states, **_weights(attention, *QKV), norm=self.input_layernorm.norm, strip=self._strip)
        widths = [getattr(attention, name).out_features for name in QKV]
        query, key, value = (
            one.view(requests, n_rows, -1, dim).transpose(1, 2) for one in torch.split(found, widths, -1)
        )
        norms = tuple(getattr(attention, name).norm for name in HEAD_NORMS) if hasattr(attention, "q_norm") else None
        query, key = rotated(query, key, cos, sin, norms)
        through = {name: one for name, one in kwargs.items() if name not in ("position_embeddings", "past_key_values")}
        key, value = kwargs["past_key_values"].update(key, value, attention.layer_idx)
        mask = through.pop("attention_mask")
        attended, _ = self._attend(attention, query, key, value, mask, **self._how, **through)
        hidden = projected(
            attended.flatten(2), **_weights(attention, "o_proj"), residual=hidden_states, strip=self._strip
        )
        mlp = self.mlp
        opened = gate_projected(
            hidden,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.activation,
            norm=self.post_attention_layernorm.norm,
            strip=self._strip,
        )
        return projected(opened, **_weights(mlp, "down_proj"), residual=hidden, strip=self._strip)


def leanest_steps(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Return views of a model for decode steps by name, the leanest first, and last the `model` itself.

    Which is fastest depends on the device; one that will not do there is found out by who uses it.
    """
    lean, *rest = leanest_first(model)
    views = _layered(model, lean) if rest else {}
    if rest:
        views["modules"] = lean
    return {**views, "model": model}


def _layered(model: PreTrainedModel, view: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Return views with the leanest layers, one for each strip by which there are any."""
    from qcfuse_rag.runtime.fused_layers.product import STRIPS

    own, lean = (one.get_decoder()._modules.get("layers") for one in (model, view))
    if not isinstance(own, nn.ModuleList) or not isinstance(lean, nn.ModuleList):
        return {}
    checks = [_checked(*pair) for pair in zip(own, lean, strict=True)]
    views: dict[str, PreTrainedModel] = {}
    for strip in STRIPS:
        layers = [
            layer if check is None else _leaner(layer, strip, check) for layer, check in zip(lean, checks, strict=True)
        ]
        count = sum(isinstance(layer, LeanLayer) for layer in layers)
        LOG.info("layers of eight kernels by %s: %d of %d", strip, count, len(layers))
        if count:
            found = with_module(view, nn.ModuleList(layers), instead=lean)
            assert isinstance(found, PreTrainedModel)
            views[f"layers by {strip.columns} x {strip.depth}"] = found
    return views


@torch.inference_mode()
def _checked(own: Any, lean: Any) -> LayerCheck | None:
    """Return by what a layer's stand-in is checked; None if there is none for it."""
    try:
        if _of_this_form(own, lean):
            attention = own.self_attn
            return LayerCheck.of(own, attention.q_proj.in_features, int(attention.head_dim))
    except Exception as error:  # of whatever a model has
        LOG.info("a layer stays as it is: %s: %s", type(error).__name__, error)
    return None


@torch.inference_mode()
def _leaner(lean: nn.Module, strip: Strip, check: LayerCheck) -> nn.Module:
    """Return what takes a layer's place: itself, as a lean view has it, if its stand-in does not come out right."""
    try:
        if check.met_by(lambda attend: LeanLayer(lean, strip, check.how, attend)):
            return LeanLayer(lean, strip, check.how)
        LOG.info("a layer stays as it is: its stand-in comes out otherwise")
    except Exception as error:  # of whatever does not compile
        LOG.info("a layer stays as it is: %s: %s", type(error).__name__, error)
    return lean


def _of_this_form(own: Any, lean: Any) -> bool:
    """Return whether a layer has the parts of one that is computed here, and nobody has changed them."""
    from qcfuse_rag.runtime.fused_layers.product import NORMALISED

    if own is lean or set(own._modules) != PARTS or not isinstance(lean.mlp, LeanGate):
        return False
    attention, mlp, parts = own.self_attn, own.mlp, set(own.self_attn._modules)
    head_norms = [lean.self_attn._modules[name] for name in HEAD_NORMS if name in parts]
    norms = [lean.input_layernorm, lean.post_attention_layernorm, *head_norms]
    asking, gating = [attention._modules.get(name) for name in QKV], [mlp.gate_proj, mlp.up_proj]
    forwards = [inspect.unwrap(type(one).forward) for one in (own, attention)]
    named = {name for forward in forwards for name in forward.__code__.co_names}
    return (
        attention.config._attn_implementation == ATTENTION_NAME
        and parts - set(HEAD_NORMS) == {*QKV, "o_proj"}
        and len(head_norms) in (0, len(HEAD_NORMS))
        and all(isinstance(one, LeanNorm) for one in norms)
        and not changed(attention)
        and INTERFACES in named
        and not named & CUT_OFF
        and all(
            type(one) is nn.Linear and not changed(one) for one in (*asking, attention.o_proj, *gating, mlp.down_proj)
        )
        and len({one.bias is None for one in asking}) == 1
        and all(one.bias is None for one in gating)
        and {one.dtype for one in own.parameters()} == {attention.q_proj.weight.dtype}
        and all(one.data_ptr() for one in own.parameters())  # one that stands for others, as if quantised, has none
        and attention.q_proj.weight.dtype in NORMALISED
    )


def _weights(module: Any, *names: str) -> dict[str, Any]:
    linears = [getattr(module, name) for name in names]
    biases = None if linears[0].bias is None else [one.bias for one in linears]
    return {"weights": [one.weight for one in linears], "biases": biases}
