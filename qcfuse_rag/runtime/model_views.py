"""Views of a model that share its weights and run other layers, so that a pass can act between layers.

transformers' decoders run a list of layers. A view has another list. The model and its classes stay as they are, and so
do passes that run the model itself; views by `fused_layers` also replace functions that modules call, in copies.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn


class ModuleProxy(nn.Module):
    """A module that stands for another, `inner`, and forwards attribute access to it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute on `inner`: decoders read a layer's kind of attention, some models a norm's weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class LayerRunner(Protocol):
    """Runs the layers of a decoder in one pass."""

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a layer of `[1, R, H]` hidden states; return its output in the form that the decoder expects."""
        ...


class HookedLayer(ModuleProxy):
    """A decoder layer of a view; a layer runner computes it."""

    def __init__(self, inner: nn.Module, index: int, layer_runner: LayerRunner) -> None:
        super().__init__(inner)
        self._index, self._layer_runner = index, layer_runner

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer by the layer runner."""
        return self._layer_runner.run(self._index, self.inner, hidden_states, args, kwargs)


def decoder_view(decoder: nn.Module, depth: int | None, layer_runner: LayerRunner | None) -> nn.Module:
    """Return a view of a decoder with its first `depth` layers or all, computed by a layer runner if there is one."""
    layers = decoder._modules["layers"]
    assert isinstance(layers, nn.ModuleList)
    first: Sequence[nn.Module] = list(layers[:depth])
    if layer_runner is not None:
        first = [HookedLayer(layer, index, layer_runner) for index, layer in enumerate(first)]
    return with_module(decoder, nn.ModuleList(first), instead=layers)


def model_view(model: nn.Module, decoder: nn.Module, layer_runner: LayerRunner) -> nn.Module:
    """Return a view of a model whose decoder layers are computed by a layer runner."""
    return with_module(model, decoder_view(decoder, None, layer_runner), instead=decoder)


class ViewCache:
    """Views of a model for repeated use, because building a view takes as long as launching many kernels.

    Only one pass at a time may run through them.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        self._decoder, self._current = decoder, _CurrentRunner()
        self._model = model_view(model, decoder, self._current)
        self._decoders: dict[int, nn.Module] = {}

    @contextmanager
    def computed_by(self, layer_runner: LayerRunner, depth: int | None = None) -> Iterator[nn.Module]:
        """Yield the model's view, or that of the decoder's first layers, computed by a layer runner in the context."""
        if depth is not None and depth not in self._decoders:
            self._decoders[depth] = decoder_view(self._decoder, depth, self._current)
        self._current.layer_runner = layer_runner
        try:
            yield self._model if depth is None else self._decoders[depth]
        finally:
            self._current.layer_runner = None


class _CurrentRunner:
    """Forwards to the layer runner of the current pass; views refer to it, so that no view refers to itself."""

    layer_runner: LayerRunner | None = None

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.layer_runner is not None
        return self.layer_runner.run(layer, inner, hidden, args, kwargs)


def with_module(module: nn.Module, replacement: nn.Module, *, instead: nn.Module) -> nn.Module:
    """Return a view of a module in which a submodule at any depth is replaced; weights are shared."""
    if module is instead:
        return replacement
    parts = dict(module._modules)
    for name, child in module._modules.items():
        if child is not None and any(submodule is instead for submodule in child.modules()):
            parts[name] = with_module(child, replacement, instead=instead)
    return view_of(module, parts)


def view_of(
    module: nn.Module, parts: dict[str, nn.Module | None], forward: types.FunctionType | None = None
) -> nn.Module:
    """Return a view of a module that has other modules inside, and another forward if one is given."""
    view = copy.copy(module)
    view._modules = parts
    if forward is not None:  # a class, since a bound method would keep the view and its weights in a ring
        own = type(module)
        view.__class__ = type(f"Fused{own.__name__}", (own,), {"forward": forward, "__module__": own.__module__})
    return view
