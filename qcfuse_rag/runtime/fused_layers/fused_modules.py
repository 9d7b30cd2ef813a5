"""A view of a model whose norms, rotations, gates and products of a few rows are a kernel each.

The model stays as it is; the view shares its weights (`view_of`). A fused module replaces a module of the model
only if both return the same for random numbers. Every other module stays.
"""

from __future__ import annotations

import logging
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qcfuse_rag.runtime.model_views import ModuleProxy, view_of

GATED = {"gate_proj", "up_proj", "down_proj"}
"""Names of the parts of a gated feed-forward network in transformers' models."""
ROTATION = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys in transformers' models."""
CAPTURING = "transformers.utils.output_capturing"
SMALL, LARGE, REPEATS = (0.002, 0.03), (1.0, 30.0), 18
"""Scales of the rows that modules are compared on, repeated so that they need more than one program. Small rows show a
number that a norm adds to the mean square, large rows a gate that is cut off."""
ROWS, FEW = 3, 16
"""Rows to compare rotations on, and products of a few rows."""

PROJECTIONS, OUTPUT = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
"""Names of the parts in transformers' models."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest relative error of a row: one function rounds once, the other several times."""

LOG = logging.getLogger(__name__)


class OneInput(ModuleProxy):
    """A view of a module that computes calls with one input itself; any other call goes to the model's own module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own module returns."""
        return self.inner(*args, **kwargs) if kwargs or len(args) != 1 else self.compute(args[0])

    def compute(self, given: Tensor) -> Any:
        """Compute the module for its one input."""
        raise NotImplementedError


class FusedNorm(OneInput):
    """Root mean square normalisation in one kernel; `eps` is added to the mean square, `offset` to the weight."""

    def __init__(self, inner: nn.Module, eps: float, offset: float) -> None:
        super().__init__(inner)
        self._eps, self._offset = eps, offset

    def compute(self, given: Tensor) -> Any:
        """Normalise hidden states of the weight's width."""
        from qcfuse_rag.runtime.fused_layers.pointwise import normalized

        weight: Any = self.inner.weight
        if given.shape[-1] != len(weight):
            return self.inner(given)
        return normalized(given, weight, self._eps, self._offset)


class FusedGate(OneInput):
    """A gated feed-forward network whose gate is one kernel, with kernels for products of a few rows if they are used.

    The activation is one of `pointwise.ACTIVATIONS`.
    """

    def __init__(self, inner: nn.Module, activation: str, *, few_row_kernels: bool) -> None:
        super().__init__(inner)
        self.activation, self._few_row_kernels = activation, few_row_kernels
        self._down = FewRowProducts([inner.down_proj])  # type: ignore[list-item] # a linear layer, see `_gate`

    def compute(self, given: Tensor) -> Any:
        """Compute the network."""
        from qcfuse_rag.runtime.fused_layers.pointwise import gated
        from qcfuse_rag.runtime.fused_layers.skinny_products import gate_projected, supports

        parts: Any = self.inner
        weights = parts.gate_proj.weight, parts.up_proj.weight
        if self._few_row_kernels and supports(given, weights):
            return self._down.product(0, gate_projected(given, *weights, self.activation))
        return parts.down_proj(gated(parts.gate_proj(given), parts.up_proj(given), self.activation))


class FewRowProducts:
    """Multiplies rows with several weights at once, when the product with the first weight is asked for.

    All are products over the same channels, all with biases or all without.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = linears
        self._last: tuple[Tensor, list[Tensor]] | None = None

    def product(self, index: int, rows: Tensor) -> Tensor:
        """Return the product of rows with one of the weights. Many rows are multiplied with this weight alone."""
        from qcfuse_rag.runtime.fused_layers.skinny_products import projected, supports

        last = self._last
        if last is None or last[0] is not rows:
            weights = [linear.weight for linear in self._linears]
            if not supports(rows, weights):
                return self._linears[index](rows)  # type: ignore[no-any-return]
            biases = [linear.bias for linear in self._linears if linear.bias is not None]
            last = self._last = rows, projected(rows, weights, biases or None)
        if index == len(self._linears) - 1:
            self._last = None  # hold no memory between passes
        return last[1][index]


class FewRowProduct(OneInput):
    """View of a matrix product that is computed together with others."""

    def __init__(self, inner: nn.Module, joint: FewRowProducts, index: int) -> None:
        super().__init__(inner)
        self._joint, self._index = joint, index

    def compute(self, given: Tensor) -> Any:
        """Compute the product."""
        return self._joint.product(self._index, given)


def few_row_products(linears: Sequence[nn.Linear]) -> list[FewRowProduct]:
    """Return views of matrix products over the same rows. Callers must use them in this order."""
    joint = FewRowProducts(linears)
    return [FewRowProduct(linear, joint, index) for index, linear in enumerate(linears)]


def fused_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view of a model that computes the same with fewer kernels; the model itself if nothing can be fused."""
    try:
        builder = _FusedViewBuilder(model)
        view = builder.view(model)
    except Exception as error:  # of whatever a model has
        LOG.warning("no operations are fused: %s: %s", type(error).__name__, error)
        return model
    LOG.info("in one kernel each: %s", dict(builder.fused_counts) or "nothing")
    assert isinstance(view, PreTrainedModel)
    return view


class _FusedViewBuilder:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._device, self._dtype = model, model.device, model.dtype
        self._generator = torch.Generator(self._device).manual_seed(0)
        self._rotations: dict[Callable[..., Any], Callable[..., Any] | None] = {}
        self._views: dict[nn.Module, nn.Module] = {}
        self.fused_counts: Counter[str] = Counter()

    @torch.inference_mode()
    def view(self, module: nn.Module) -> nn.Module:
        """Return a view of a module in which every module with a fused counterpart is replaced. Views are reused."""
        if module not in self._views:
            fused = None if changed(module) else self._norm(module) or self._gate(module) or self._inside(module)
            self._views[module] = fused or module
        return self._views[module]

    def _inside(self, module: nn.Module) -> nn.Module:
        parts = {name: None if child is None else self.view(child) for name, child in module._modules.items()}
        forward = self._forward(module)
        for kind, names in (("projections", PROJECTIONS), ("outputs", OUTPUT)):
            parts |= self._products(module, kind, names)
        if forward is None and all(parts[name] is child for name, child in module._modules.items()):
            return module
        self.fused_counts["rotations"] += forward is not None
        return view_of(module, parts, forward)

    def _norm(self, module: nn.Module) -> nn.Module | None:
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, Tensor) or weight.dim() != 1 or len(weight) == 1 or not isinstance(eps, float):
            return None
        if [name for name, _ in module.named_parameters()] != ["weight"]:
            return None
        return self._first(
            "norms", module, (FusedNorm(module, eps, offset) for offset in (0.0, 1.0)), SMALL + LARGE, len(weight)
        )

    def _gate(self, module: nn.Module) -> nn.Module | None:
        from qcfuse_rag.runtime.fused_layers.pointwise import ACTIVATIONS

        first = getattr(module, "gate_proj", None)
        if not isinstance(first, nn.Linear) or set(module._modules) - {"act_fn"} != GATED:
            return None
        products = {name: part for name, part in module._modules.items() if name in GATED and part is not None}
        bare = all(is_product(part) and (name == "down_proj" or part.bias is None) for name, part in products.items())
        tried = (
            FusedGate(module, name, few_row_kernels=few_row_kernels)
            for name in ACTIVATIONS
            for few_row_kernels in ((True, False) if bare else (False,))
        )
        return self._first("gates", module, tried, LARGE, first.in_features)

    def _first(
        self, kind: str, own: nn.Module, tried: Iterable[nn.Module], scales: tuple[float, ...], channels: int
    ) -> nn.Module | None:
        """Return the first view whose results agree; rows have no mean of 0, since some norms subtract the mean."""
        factors = torch.tensor(scales, device=self._device).repeat(REPEATS)[None, :, None]
        given = ((1 + self._random(1, factors.shape[1], channels).float()) * factors).to(self._dtype)
        agreeing = (view for view in tried if agree(own, view, given) and agree(own, view, given[:, :FEW]))
        found = next(agreeing, None)
        self.fused_counts[kind] += found is not None
        return found

    def _products(self, module: nn.Module, kind: str, names: Sequence[str]) -> dict[str, nn.Module]:
        from qcfuse_rag.runtime.fused_layers.skinny_products import supports

        own = [module._modules.get(name) for name in names]
        linears = [part for part in own if isinstance(part, nn.Linear) and is_product(part)]
        if len(linears) < len(names) or len({linear.bias is None for linear in linears}) > 1:
            return {}
        views, rows = few_row_products(linears), self._random(1, FEW, linears[0].in_features)
        if not supports(rows, [linear.weight for linear in linears]) or not agree(
            lambda x: tuple(part(x) for part in linears), lambda x: tuple(part(x) for part in views), rows
        ):
            return {}
        self.fused_counts[kind] += 1
        return dict(zip(names, views, strict=True))

    def _forward(self, module: nn.Module) -> types.FunctionType | None:
        forward = type(module).forward
        if not isinstance(forward, types.FunctionType) or ROTATION not in forward.__code__.co_names:
            return None
        own = forward.__globals__.get(ROTATION)
        if own is None:
            return None
        if own not in self._rotations:
            self._rotations[own] = self._rotation(own)
        rotation = self._rotations[own]
        if rotation is None:
            return None
        return with_globals(forward, **{ROTATION: rotation})

    def _rotation(self, own: Callable[..., Any]) -> Callable[..., Any] | None:
        from qcfuse_rag.runtime.fused_layers.pointwise import rotated

        config = self._model.config.get_text_config().per_layer_config[0]
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        query, key = (self._random(1, ROWS, count, dim).transpose(1, 2) for count in (heads, kv_heads))
        angles = self._random(1, ROWS, dim // 2).float().repeat(1, 1, 2)
        both = {dtype: (angles.cos().to(dtype), angles.sin().to(dtype)) for dtype in {self._dtype, torch.float32}}
        taken = {dtype for dtype, angle in both.items() if agree(own, rotated, query, key, *angle)}

        def rotation(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != 4 or args[2].dtype not in taken or not _rotates_all(*args):
                return own(*args, **kwargs)
            return rotated(*args)

        return rotation if taken else None

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device).to(self._dtype)


def changed(module: nn.Module) -> bool:
    """Return whether a library has replaced a module's forward or added hooks, which a view would not run.

    Hooks of transformers that return hidden states do not count. They stay after the first request for hidden states.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(getattr(hook, "__module__", "") != CAPTURING for hook in hooks)


def is_product(module: nn.Module) -> bool:
    """Return whether a module is a matrix product, perhaps with a bias, and nothing else."""
    return type(module) is nn.Linear and not changed(module)


def with_globals(forward: types.FunctionType, **others: Any) -> types.FunctionType:
    """Return a copy of a function in which some names of its module refer to other objects."""
    seen = {**forward.__globals__, **others}
    other = types.FunctionType(forward.__code__, seen, forward.__name__, forward.__defaults__, forward.__closure__)
    other.__kwdefaults__ = forward.__kwdefaults__
    return other


def _rotates_all(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether all channels of all heads are to be rotated, and lie as the kernel expects."""
    if not query.dim() == key.dim() == 4 or not cos.dim() == sin.dim() == 3:
        return False
    requests, _, rows, channels = query.shape
    return (
        key.shape[0] == requests
        and cos.shape == sin.shape
        and cos.shape[0] in (1, requests)
        and key.shape[2:] == cos.shape[1:] == (rows, channels)
        and query.dtype == key.dtype
        and cos.dtype == sin.dtype
        and query.stride(3) == key.stride(3) == 1
    )


def agree(own: Callable[..., Any], other: Callable[..., Any], *given: Tensor) -> bool:
    """Return whether both functions return the same for the same arguments; False if one of them raises."""
    try:
        pairs = list(zip(_listed(own(*given)), _listed(other(*given)), strict=True))
    except Exception as error:  # a model's code may raise anything
        LOG.info("%s cannot be compared: %s: %s", type(own).__name__, type(error).__name__, error)
        return False
    return all(
        found.shape == expected.shape and found.dtype == expected.dtype and _near(found, expected)
        for expected, found in pairs
    )


def _near(found: Tensor, expected: Tensor) -> bool:
    """Compare row by row; rows with values beyond the dtype's range do not count."""
    error, size = ((found - expected).float().norm(dim=-1), expected.float().norm(dim=-1))
    finite = size.isfinite()
    return bool(finite.any()) and bool((error[finite] <= TOLERANCE.get(expected.dtype, 0.0) * size[finite]).all())


def _listed(found: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)
