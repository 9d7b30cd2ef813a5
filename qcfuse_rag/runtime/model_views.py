"""A view of a model that shares its weights and runs other layers: how a pass changes what happens between layers.

transformers' decoders run a list of layers. In a view the list is another one, so that no model code is patched, and
passes that run the model itself know of none of this.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn


class ModuleProxy(nn.Module):
    """Stands for a module, and answers for it.

    Args:
        inner: the module.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Ask the module inside: decoders ask layers for their kind of attention, some models a norm for its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class LayerRunner(Protocol):
    """What runs instead of a decoder's layers in one pass."""

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a layer.

        Args:
            layer: which.
            inner: the layer itself.
            hidden: `[1, R, H]` hidden states.
            args: what else the decoder gives its layers.
            kwargs: the same, by name.

        Returns:
            What the decoder expects of a layer.
        """
        ...


class HookedLayer(ModuleProxy):
    """A decoder layer in a view."""

    def __init__(self, inner: nn.Module, index: int, layer_runner: LayerRunner) -> None:
        super().__init__(inner)
        self._index, self._layer_runner = index, layer_runner

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Have the layer runner compute the layer."""
        return self._layer_runner.run(self._index, self.inner, hidden_states, args, kwargs)


def decoder_view(decoder: nn.Module, depth: int, layer_runner: LayerRunner | None) -> nn.Module:
    """Return a decoder with its first `depth` layers, which a layer runner runs if there is one."""
    layers = decoder._modules["layers"]
    assert isinstance(layers, nn.ModuleList)
    first: Sequence[nn.Module] = list(layers[:depth])
    if layer_runner is not None:
        first = [HookedLayer(layer, index, layer_runner) for index, layer in enumerate(first)]
    return with_module(decoder, nn.ModuleList(first), instead=layers)


def model_view(model: nn.Module, decoder: nn.Module, n_layers: int, layer_runner: LayerRunner) -> nn.Module:
    """Return a model whose decoder's layers a layer runner runs."""
    return with_module(model, decoder_view(decoder, n_layers, layer_runner), instead=decoder)


class ViewCache:
    """Views of a model that are made once, because making one takes as long as launching many kernels.

    One pass at a time runs through them.

    Args:
        model: the model.
        decoder: of the model.
        n_layers: it has.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module, n_layers: int) -> None:
        self._decoder, self._current = decoder, _CurrentRunner()
        self._model = model_view(model, decoder, n_layers, self._current)
        self._decoders: dict[int, nn.Module] = {}

    @contextmanager
    def model(self, layer_runner: LayerRunner) -> Iterator[nn.Module]:
        """Have a layer runner run all layers; yields the model."""
        with self._current.instead(layer_runner):
            yield self._model

    @contextmanager
    def decoder(self, depth: int, layer_runner: LayerRunner) -> Iterator[nn.Module]:
        """Have a layer runner run the first `depth` layers; yields the decoder."""
        if depth not in self._decoders:
            self._decoders[depth] = decoder_view(self._decoder, depth, self._current)
        with self._current.instead(layer_runner):
            yield self._decoders[depth]


class _CurrentRunner:
    """Forwards to the layer runner of the current pass; keeps no reference to it afterwards."""

    def __init__(self) -> None:
        self._layer_runner: LayerRunner | None = None

    @contextmanager
    def instead(self, layer_runner: LayerRunner) -> Iterator[None]:
        self._layer_runner = layer_runner
        try:
            yield
        finally:
            self._layer_runner = None

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._layer_runner is not None
        return self._layer_runner.run(layer, inner, hidden, args, kwargs)


def with_module(module: nn.Module, new: nn.Module, *, instead: nn.Module) -> nn.Module:
    """Return a view of a module that shares its weights and has another module instead of one inside, however deep."""
    if module is instead:
        return new
    view = copy.copy(module)
    view._modules = dict(module._modules)
    for name, child in module._modules.items():
        if child is not None and any(one is instead for one in child.modules()):
            view._modules[name] = with_module(child, new, instead=instead)
    return view
