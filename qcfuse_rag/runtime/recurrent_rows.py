"""Compute rows in recurrent layers: the recurrence runs over stored inputs, with the rows' own inputs in their places.

A view of the model has other mixers (`models.recurrence`). They multiply the rows alone, write the products to the
buffer as an attention layer writes keys and values, and hand the model's own mixer the products of all tokens. So the
model's own code computes convolution, recurrence and gate, over everything that stands before the rows. What it costs
beside the products is small, and it begins behind the tokens that did not change since the last pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from qcfuse_rag.runtime.rows import OwnBuffersLayer, StoredSequence


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
        if not isinstance(stored, RowsLayer | OwnBuffersLayer):
            return self.inner(*args, **kwargs)
        products = [self.inner.get_submodule(linear)(call.hidden) for linear in self._layer.projections]
        used = torch.cat([rows[..., kept] for rows, kept in zip(products, self._kept, strict=True)], -1)
        shape = self._layer.shape
        padded = F.pad(used, (0, 2 * shape.kv_heads * shape.key_dim - used.shape[-1]))
        keys, values = padded.view(*padded.shape[:2], 2, shape.kv_heads, shape.key_dim).permute(2, 0, 3, 1, 4)
        stored.write(keys, values)
        sequences = stored.sequences()
        outputs = []
        for index, sequence in enumerate(sequences):
            rows = products if len(sequences) == 1 else [each[index : index + 1] for each in products]
            outputs.append(self._outputs(rows, sequence, call))
        return self.inner.get_submodule(self._layer.output)(torch.cat(outputs))

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
