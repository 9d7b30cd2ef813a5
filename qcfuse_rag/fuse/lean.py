"""A view of a model whose norms, rotations and gates are a kernel each, for passes that are recorded.

Nothing of the model is changed: the view shares its weights, see `decoder_view`, and what is put in a module's place
was compared with it on random numbers before. What is not known, or comes out otherwise, stays the model's own.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

GATED = {"gate_proj", "up_proj", "down_proj"}
"""What transformers' models call the parts of a gated feed-forward network."""
ROTATION = "apply_rotary_pos_emb"
"""What transformers' models call the function by which their attention rotates."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error of each row of what is put in a module's place: it is rounded once, the model's own several times."""
SMALL, LARGE = (0.002, 0.03), (1.0, 30.0)
"""Scales of rows to compare with: where norms add something to a mean square, and up to where gates may be cut off."""

ROWS = 3
"""To be rotated."""


class LeanNorm(nn.Module):
    """Root mean square normalisation in one kernel.

    Args:
        inner: the model's own.
        eps: added to the mean square.
        offset: added to the weight.
    """

    def __init__(self, inner: nn.Module, eps: float, offset: float) -> None:
        super().__init__()
        self.inner, self.eps, self.offset = inner, eps, offset

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalise; with more to go by than hidden states, as the model does."""
        from qcfuse_rag.fuse.kernels.pointwise import normalized

        if args or kwargs:
            return self.inner(hidden, *args, **kwargs)
        weight = self.inner.weight
        assert isinstance(weight, Tensor)
        return normalized(hidden, weight, self.eps, self.offset)


class LeanGate(nn.Module):
    """A gated feed-forward network whose gate is one kernel.

    Args:
        inner: the model's own.
        activation: see `pointwise.ACTIVATIONS`.
    """

    def __init__(self, inner: nn.Module, activation: str) -> None:
        super().__init__()
        self.inner, self.activation = inner, activation

    def forward(self, hidden: Tensor) -> Any:
        """Compute what the model's own does."""
        from qcfuse_rag.fuse.kernels.pointwise import gated

        parts: Any = self.inner
        return parts.down_proj(gated(parts.gate_proj(hidden), parts.up_proj(hidden), self.activation))


def lean_view(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view of a model that computes the same with fewer kernels; the model itself if nothing can be spared."""
    view = _Leaning(model).view(model)
    assert isinstance(view, PreTrainedModel)
    return view


class _Leaning:
    """Finds what can be put in the place of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        weight = next(model.parameters())
        self._generator = torch.Generator(weight.device).manual_seed(0)
        self._device, self._dtype = weight.device, weight.dtype
        self._rotations: dict[Callable[..., Any], Callable[..., Any] | None] = {}

    @torch.inference_mode()
    def view(self, module: nn.Module) -> nn.Module:
        """Return a view of a module with everything inside replaced that can be."""
        if "forward" in vars(module):  # somebody has put another in its place, which knows this module only
            return module
        instead = self._norm(module) or self._gate(module)
        if instead is not None:
            return instead
        parts = {name: None if child is None else self.view(child) for name, child in module._modules.items()}
        forward = self._forward(module)
        if forward is None and all(parts[name] is child for name, child in module._modules.items()):
            return module
        view = copy.copy(module)
        view._modules = parts
        if forward is not None:
            view.forward = types.MethodType(forward, view)
        return view

    def _norm(self, module: nn.Module) -> nn.Module | None:
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
            return None
        given = self._rows(SMALL + LARGE, len(weight))
        tried = (LeanNorm(module, eps, offset) for offset in (0.0, 1.0))
        return next((one for one in tried if _same(module, one, given)), None)

    def _gate(self, module: nn.Module) -> nn.Module | None:
        from qcfuse_rag.fuse.kernels.pointwise import ACTIVATIONS

        first = getattr(module, "gate_proj", None)
        if not isinstance(first, nn.Linear) or set(module._modules) - {"act_fn"} != GATED:
            return None
        given = self._rows(LARGE, first.in_features)
        tried = (LeanGate(module, activation) for activation in ACTIVATIONS)
        return next((one for one in tried if _same(module, one, given)), None)

    def _forward(self, module: nn.Module) -> types.FunctionType | None:
        """Return a module's forward that rotates by a kernel, or None if it rotates otherwise or not at all."""
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
        seen = {**forward.__globals__, ROTATION: rotation}
        other = types.FunctionType(forward.__code__, seen, forward.__name__, forward.__defaults__, forward.__closure__)
        other.__kwdefaults__ = forward.__kwdefaults__
        return other

    def _rotation(self, own: Callable[..., Any]) -> Callable[..., Any] | None:
        from qcfuse_rag.fuse.kernels.pointwise import rotated

        def rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs or not _rotates_all(query, key, cos, sin):
                return own(query, key, cos, sin, *args, **kwargs)
            return rotated(query, key, cos, sin)

        query, key = (self._random(1, ROWS, heads, 16).transpose(1, 2) for heads in (4, 2))
        angles = self._random(1, ROWS, 8).float().repeat(1, 1, 2)
        given = (query, key, angles.cos().to(self._dtype), angles.sin().to(self._dtype))
        return rotation if _same(own, rotation, *given) else None

    def _rows(self, scales: tuple[float, ...], channels: int) -> Tensor:
        """Return a row of each scale, `[1, R, channels]`, none of mean 0: some norms take the mean away."""
        factors = torch.tensor(scales, device=self._device)[None, :, None]
        return ((1 + self._random(1, len(scales), channels).float()) * factors).to(self._dtype)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device).to(self._dtype)


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
        and query.dtype == key.dtype == cos.dtype == sin.dtype
        and query.stride(3) == key.stride(3) == 1
    )


def _same(own: Callable[..., Any], other: Callable[..., Any], *given: Tensor) -> bool:
    """Return whether two ways of computing come to the same; what one of them cannot do is not the same."""
    try:
        pairs = list(zip(_listed(own(*given)), _listed(other(*given)), strict=True))
    except Exception:  # of whatever code a model has
        return False
    return all(one.shape == two.shape and one.dtype == two.dtype and _near(two, one) for one, two in pairs)


def _near(found: Tensor, expected: Tensor) -> bool:
    off, size = ((one.float()).norm(dim=-1) for one in (found - expected, expected))
    return expected.dtype in TOLERANCE and bool((off <= TOLERANCE[expected.dtype] * size).all())


def _listed(found: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)
