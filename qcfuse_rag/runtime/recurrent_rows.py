"""Compute rows in recurrent layers: the recurrence runs over stored inputs, with the rows' own inputs in their places.

A view of the model has other mixers (`models.recurrence`). They multiply the rows alone, write the products to the
buffer as an attention layer writes keys and values, and hand the model's own mixer the products of all tokens. So the
model's own code computes convolution, recurrence and gate, over everything that stands before the rows. What it costs
beside the products is small, and it begins behind the tokens that did not change since the last pass. A step of several
requests runs the mixer once, over their states together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from qcfuse_rag.models.recurrence import MixerCall, RecurrentLayer
from qcfuse_rag.models.rope import decoder_of
from qcfuse_rag.runtime.buffer import RowsLayer
from qcfuse_rag.runtime.model_views import ModuleProxy, with_module
from qcfuse_rag.runtime.rows import StepLayer, StoredSequence


def recurrent_view(model: PreTrainedModel, layers: Mapping[int, RecurrentLayer]) -> PreTrainedModel:
    """Return a view of a model whose recurrent layers compute rows over a buffer; it shares the weights."""
    view: nn.Module = model
    for index, layer in layers.items():
        mixer = decoder_of(model).get_submodule(layer.mixer)
        view = with_module(view, RecurrentRows(mixer, layer, index), instead=mixer)
    return view


class RecurrentRows(ModuleProxy):
    """A view of a mixer that computes rows."""

    def __init__(self, mixer: nn.Module, layer: RecurrentLayer, index: int) -> None:
        super().__init__(mixer)
        self._layer, self._index, self._call = layer, index, _Call()
        self._kept = [_channels(used) for used in layer.used]
        self._widths = [int(used.sum()) for used in layer.used]
        recurrence = mixer
        for place, name in enumerate(layer.projections):
            given = _Given(self._call, place)
            recurrence = with_module(recurrence, given, instead=mixer.get_submodule(name))
        self.recurrence = with_module(recurrence, _Picked(self._call), instead=mixer.get_submodule(layer.output))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute `[B, R, H]` hidden states of rows; over another cache than a buffer's, do as the model does."""
        call = MixerCall.of(args, kwargs)
        stored = None if call.cache is None else call.cache.layers[self._index]
        if not isinstance(stored, RowsLayer | StepLayer):
            return self.inner(*args, **kwargs)
        products = [self.inner.get_submodule(linear)(call.hidden) for linear in self._layer.projections]
        used = torch.cat([rows[..., kept] for rows, kept in zip(products, self._kept, strict=True)], -1)
        shape = self._layer.shape
        padded = F.pad(used, (0, 2 * shape.kv_heads * shape.key_dim - used.shape[-1]))
        keys, values = padded.view(*padded.shape[:2], 2, shape.kv_heads, shape.key_dim).permute(2, 0, 3, 1, 4)
        stored.write(keys, values)
        sequences = stored.sequences()
        if len(sequences) > 1 and all(self._is_step(sequence) for sequence in sequences):
            output = self._step(products, sequences, call)
        else:
            rows = [products] if len(sequences) == 1 else zip(*(torch.split(each, 1) for each in products), strict=True)
            outputs = [self._outputs([*own], each, call) for own, each in zip(rows, sequences, strict=True)]
            output = torch.cat(outputs)
        return self.inner.get_submodule(self._layer.output)(output)

    def _is_step(self, sequence: StoredSequence) -> bool:
        """Tell whether a sequence has one row, directly behind its state."""
        if sequence.states is None or self._index not in sequence.states or sequence.visible is not None:
            return False
        return sequence.first + 1 == sequence.length == sequence.states[self._index][0] + 1

    def _step(self, products: list[Tensor], sequences: Sequence[StoredSequence], call: MixerCall) -> Tensor:
        """Run the recurrence over one row of each sequence; return `[B, 1, C]` like `_outputs`."""
        kept = [sequence.states for sequence in sequences if sequence.states is not None]
        joined = _joined([states.pop(self._index)[1] for states in kept])
        cache = Cache(layers=[joined] * (self._index + 1))
        with self._call.of(products, None):
            output: Tensor = self.recurrence(call.hidden, **{**call.options, call.cache_name: cache})
        for states, sequence, state in zip(kept, sequences, _parted(joined, len(kept)), strict=True):
            states[self._index] = sequence.length, state
        return output

    def _outputs(self, products: list[Tensor], sequence: StoredSequence, call: MixerCall) -> Tensor:
        """Run the recurrence up to the last row; return `[B, R, C]`, the rows' inputs of the mixer's last product."""
        begin, state, picked, options = 0, None, None, call.options
        states = sequence.states if sequence.visible is None else None
        if sequence.states is not None:
            begin, state = sequence.states.pop(self._index, (0, None))
        refused = not self._layer.continues and sequence.length - begin > 1
        if states is None or state is None or begin > sequence.first or refused:
            begin, state = 0, LinearAttentionLayer()
        if states is not None:
            options = {**options, call.cache_name: Cache(layers=[state] * (self._index + 1))}
        if sequence.length - begin > products[0].shape[1]:
            products, picked = self._with_stored(products, sequence, begin)
        tokens = call.hidden[: len(products[0]), :1].expand(-1, products[0].shape[1], -1)  # only their number counts
        with self._call.of(products, picked):
            output: Tensor = self.recurrence(tokens, **options)
        if states is not None:
            states[self._index] = sequence.length, state
        return output

    def _with_stored(self, products: list[Tensor], sequence: StoredSequence, begin: int) -> tuple[list[Tensor], Tensor]:
        """Return all tokens' products from `begin` on, 0 where nothing reads them, and the indices of the rows."""
        rows, seen = sequence.rows, torch.arange(begin, sequence.length, device=products[0].device)
        if sequence.visible is not None:
            seen = sequence.visible[sequence.visible < sequence.length]
        inside = torch.searchsorted(seen, rows)
        sides = [side[:, :, seen].transpose(1, 2).flatten(2) for side in (sequence.keys, sequence.values)]
        stored = torch.split(torch.cat(sides, -1)[..., : sum(self._widths)], self._widths, -1)
        whole = []
        for own, kept, others in zip(products, self._kept, stored, strict=True):
            each = own.new_zeros(len(own), len(seen), own.shape[-1])
            each[..., kept] = others
            each[:, inside] = own
            whole.append(each)
        return whole, inside


def _joined(values: Sequence[Any]) -> Any:
    """Return the states of several sequences as one with a batch of them: tensors are joined, also in dictionaries."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, dict):
        return {key: _joined([value[key] for value in values]) for key in first}
    if isinstance(first, LinearAttentionLayer):
        joined = copy(first)
        joined.__dict__.update(_joined([vars(value) for value in values]))
        return joined
    return first


def _parted(value: Any, count: int) -> list[Any]:
    """Return each sequence's part of joined states; they share memory, which lives as long as one of them."""
    if isinstance(value, Tensor):
        return [*torch.split(value, 1)]
    if isinstance(value, dict):
        parts = {key: _parted(each, count) for key, each in value.items()}
        return [{key: part[index] for key, part in parts.items()} for index in range(count)]
    if isinstance(value, LinearAttentionLayer):
        layers = [copy(value) for _ in range(count)]
        for layer, part in zip(layers, _parted(vars(value), count), strict=True):
            layer.__dict__.update(part)
        return layers
    return [value] * count


def _channels(used: Tensor) -> slice | Tensor:
    """Return `[C]` bool as an index: a slice, which copies faster, if the channels have no gaps."""
    kept = used.nonzero()[:, 0]
    first, count = int(kept[0]) if len(kept) else 0, len(kept)
    return slice(first, first + count) if torch.equal(kept, torch.arange(first, first + count)) else kept


class _Call(threading.local):
    """The arguments that a call of a mixer passes to the modules inside it; each thread has its own."""

    products: list[Tensor]
    picked: Tensor | None

    @contextmanager
    def of(self, products: list[Tensor], picked: Tensor | None) -> Iterator[None]:
        self.products, self.picked = products, picked
        try:
            yield
        finally:
            self.products, self.picked = [], None


class _Given(nn.Module):
    """Stands for a linear layer whose products are known."""

    def __init__(self, call: _Call, place: int) -> None:
        super().__init__()
        self._call, self._place = call, place

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the products of all tokens."""
        return self._call.products[self._place]


class _Picked(nn.Module):
    """Stands for the last linear layer, which the caller multiplies with."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call

    def forward(self, given: Tensor) -> Tensor:
        """Return the rows."""
        return given if self._call.picked is None else given[:, self._call.picked]
