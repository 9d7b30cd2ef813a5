"""A pass over so many rows of a prompt, recorded layer by layer, and run again over other rows of other prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import planned_inputs
from qcfuse_rag.runtime.graphs.recorder import Recorder
from qcfuse_rag.runtime.kv_table import RebindableKVTable
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.model_views import ViewCache, decoder_view
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.table_plan import TablePlan


class GraphMismatch(Exception):
    """A pass hands its layers something else than the recorded one did, or has its buffer elsewhere than it may."""


@dataclass(frozen=True, slots=True, eq=False)
class QuerySnapshot:
    """What an observer of a layer is told: its queries `[1, Hq, R, D]`, and how they attend.

    The queries lie where those of the next layer will; who wants to keep them copies them.
    """

    query: Tensor
    scaling: float
    softcap: float | None
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerGraph:
    """A recorded layer.

    Attributes:
        given: what the decoder hands it beside hidden states, read by the layer.
        look: what it leaves for an observer.
        replay: computes it.
    """

    given: list[Tensor]
    look: QuerySnapshot
    replay: Callable[[], None]


class LayerGraphs:
    """The layers of a model, recorded for a number of rows.

    Args:
        lm: the model.
        model: what is recorded of it, itself or a view that computes the same.
        n_rows: how many.
        recorder: records each layer.
        request: of one place; passes of all numbers of rows share it and the views, as they are never run at once.
        views: of the model.
        memory: what passes of fewer rows share with those of more, which are recorded before.
    """

    @torch.inference_mode()
    def __init__(
        self,
        lm: LanguageModel,
        model: PreTrainedModel,
        n_rows: int,
        recorder: Recorder,
        request: RebindableKVTable,
        views: ViewCache,
        memory: dict[object, Tensor],
    ) -> None:
        self.n_rows = n_rows
        self._lm, self._model, self._request, self._views = lm, model, request, views
        rows = torch.zeros(1, n_rows, dtype=torch.int64, device=lm.device)
        request.bind([])  # what is recorded writes where nobody reads
        looks: dict[int, QuerySnapshot] = {}
        # Nothing here refers to itself: graphs go when nobody holds them, not in the midst of another recording.
        self._plan = TablePlan(rows, request.table, lm.sliding, partial(_save_query, looks, memory))
        recording = _LayerRecording(recorder, memory, looks)
        inputs = planned_inputs(torch.zeros_like(rows), rows, self._plan.cache(), self._plan)
        decoder_view(model.get_decoder(), lm.n_layers, recording)(**inputs)
        self._layers, self._between = recording.layers, recording.between

    def logits(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> Tensor:
        """Compute rows through all layers, as `runtime.forward.forward_rows` does.

        Raises:
            NotAsRecorded: if the pass differs from what was recorded.
        """
        hooked_pass = _LayerReplay(self._layers, self._between, plan, buffer)
        with self._views.model(hooked_pass) as model:
            logits: Tensor = model(**self._inputs(ids, plan, buffer), logits_to_keep=1).logits
        hooked_pass.check_complete(self._lm.n_layers)
        return logits[0, -1].float()

    def hidden(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, depth: int) -> Literal[True]:
        """Compute rows through some layers, as `runtime.forward.forward_hidden` does; return that it was done.

        Raises:
            NotAsRecorded: if the pass differs from what was recorded.
        """
        hooked_pass = _LayerReplay(self._layers, self._between, plan, buffer)
        with self._views.decoder(depth, hooked_pass) as decoder:
            decoder(**self._inputs(ids, plan, buffer))
        hooked_pass.check_complete(depth)
        return True

    def launched(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> Tensor:
        """Compute what `logits` does by the same kernels, launched one by one: what a recording is to be."""
        logits: Tensor = self._model(**self._inputs(ids, plan, buffer), logits_to_keep=1).logits
        return logits[0, -1].float()

    @property
    def last_query(self) -> Tensor:
        """`[1, Hq, R, D]`, what the last layer has left for an observer."""
        return self._layers[-1].look.query

    def _inputs(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> dict[str, Any]:
        """Point the recorded layers at a request, and return what its model is called with."""
        if not self._request.bind([buffer]):
            raise GraphMismatch
        repeats = self.n_rows - len(ids)
        ids, rows = (torch.cat([given, given[-1:].expand(repeats)])[None] for given in (ids, plan.rows))
        self._plan.rows.copy_(rows)
        return planned_inputs(ids, self._plan.rows, self._plan.cache(), self._plan)


def _save_query(
    looks: dict[int, QuerySnapshot],
    memory: dict[object, Tensor],
    layer: int,
    query: Tensor,
    _key: Tensor,
    scaling: float,
    softcap: float | None,
    window: int | None,
) -> None:
    """Have a layer that is being recorded leave its queries where an observer will find them."""
    if layer not in looks:
        room = _shared_memory(memory, "query", query.transpose(1, 2)).transpose(1, 2)
        looks[layer] = QuerySnapshot(room, scaling, softcap, window)
    looks[layer].query.copy_(query)


def _shared_memory(memory: dict[object, Tensor], purpose: str, like: Tensor) -> Tensor:
    """Return memory for a `[1, R, ..]` tensor, part of what a pass of more rows has for the same purpose."""
    name = (purpose, like.shape[2:], like.dtype)
    if name not in memory:
        memory[name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    assert like.shape[1] <= memory[name].shape[1], "passes of more rows are recorded first"
    return memory[name][:, : like.shape[1]]


class _LayerRecording:
    """Records the layers one after the other, each with the hidden states that the one before has left."""

    def __init__(self, recorder: Recorder, memory: dict[object, Tensor], looks: dict[int, QuerySnapshot]) -> None:
        self._recorder, self._memory, self._looks = recorder, memory, looks
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.layers: list[LayerGraph] = []
        self.between: tuple[Tensor, Tensor]

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a layer."""
        if layer == 0:
            self.between = _shared_memory(self._memory, "even", hidden), _shared_memory(self._memory, "odd", hidden)
            self.between[0].copy_(hidden)
        before, after = self.between[layer % 2], self.between[1 - layer % 2]
        args, kwargs = _map_tensors((args, kwargs), self._copy)

        def compute() -> Tensor:
            found = inner(before, *args, **kwargs)
            if not isinstance(found, Tensor):
                raise TypeError(f"a layer returns {type(found).__name__} instead of hidden states")
            return after.copy_(found)

        _, replay = self._recorder.record(compute)
        self.layers.append(LayerGraph(list(_tensors((args, kwargs))), self._looks[layer], replay))
        return after

    def _copy(self, given: Tensor) -> Tensor:
        """Return a copy of what a decoder hands its layers; one for all to whom it hands the same."""
        if id(given) not in self._copies:
            self._copies[id(given)] = given, given.clone()
        return self._copies[id(given)][1]


class _LayerReplay:
    """Runs recorded layers over a request."""

    def __init__(
        self, layers: list[LayerGraph], between: tuple[Tensor, Tensor], plan: RowsPlan, buffer: KVBuffer
    ) -> None:
        self._layers, self._between = layers, between
        self._plan, self._buffer = plan, buffer
        self._copied: dict[int, Tensor] = {}
        self._ran = 0

    def check_complete(self, depth: int) -> None:
        """Raise `GraphMismatch` if anything else has run than so many recorded layers."""
        if self._ran != depth:
            raise GraphMismatch

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a recorded layer, when what is stored of it is there; have the pass's observer look at it."""
        if self._buffer.wait_for_layer is not None:
            self._buffer.wait_for_layer(layer)
        recorded = self._layers[layer]
        if layer == 0:
            self._between[0].copy_(hidden)
        given = list(_tensors((args, kwargs)))
        if [one.shape for one in given] != [one.shape for one in recorded.given]:
            raise GraphMismatch
        for held, new in zip(recorded.given, given, strict=True):
            if self._copied.get(id(held)) is not new:
                self._copied[id(held)] = new
                held.copy_(new)
        recorded.replay()
        self._ran += 1
        observe, look = self._plan.observe, recorded.look
        if observe is not None:
            query, key = look.query[:, :, : len(self._plan.rows)], self._buffer.keys[layer][:, :, : self._plan.length]
            observe(layer, query, key, look.scaling, look.softcap, look.window)
        return self._between[1 - layer % 2]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a layer's arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a layer's arguments with other tensors in them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {name: _map_tensors(part, change) for name, part in value.items()}
    return value
