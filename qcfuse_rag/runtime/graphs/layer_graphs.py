"""Record a pass over a number of rows layer by layer, and replay it over other rows of other prompts."""

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
from qcfuse_rag.runtime.model_views import LayerRunner, ViewCache, decoder_view, model_view
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.runtime.table_plan import TablePlan


class GraphMismatch(Exception):
    """A pass gives its layers other inputs than the recorded one, or its buffer is not aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class QuerySnapshot:
    """The queries of a layer for its observer: `[1, Hq, R, D]`, and the settings of their attention.

    The next layer overwrites the queries; an observer copies them to keep them.
    """

    query: Tensor
    params: AttentionParams


@dataclass(frozen=True, slots=True, eq=False)
class LayerGraph:
    """A recorded layer.

    Attributes:
        inputs: tensors that the decoder gives the layer besides hidden states, read by the layer.
        snapshot: the queries that the layer leaves for an observer.
        replay: computes the layer.
    """

    inputs: list[Tensor]
    snapshot: QuerySnapshot
    replay: Callable[[], None]


class LayerGraphs:
    """The layers of a model, recorded for a number of rows.

    Args:
        lm: the model.
        model: the model to record: `lm.model` or a view that computes the same.
        n_rows: the number of rows.
        recorder: records each layer.
        request: the table of one request. All graphs share it and the views, because only one runs at a time.
        views: views of the model.
        memory: tensors by purpose and shape. Graphs of fewer rows share those of more rows, which are recorded first.
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
        request.bind([])  # while recording, layers write to a buffer that nothing reads
        snapshots: dict[int, QuerySnapshot] = {}
        # No reference cycles: graphs are freed with their last reference, not by a collection during another recording.
        self._plan = TablePlan(rows, request.table, lm.sliding, partial(_save_query, snapshots, memory))
        recording = _LayerRecording(recorder, memory, snapshots)
        inputs = planned_inputs(torch.zeros_like(rows), rows, self._plan.cache(), self._plan)
        decoder_view(model.get_decoder(), lm.n_layers, recording)(**inputs)
        self._layers, self._hidden = recording.layers, recording.hidden

    def logits(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> Tensor:
        """Compute rows through all layers, as `runtime.forward.forward_rows` does.

        Raises:
            GraphMismatch: if the pass differs from what was recorded.
        """
        replay = _LayerReplay(self._layers, self._hidden, plan, buffer)
        with self._views.model(replay) as model:
            logits: Tensor = model(**self._inputs(ids, plan, buffer), logits_to_keep=1).logits
        replay.check_complete(self._lm.n_layers)
        return logits[0, -1].float()

    def hidden(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, depth: int) -> Literal[True]:
        """Compute rows through some layers, as `runtime.forward.forward_hidden` does, and return True.

        Raises:
            GraphMismatch: if the pass differs from what was recorded.
        """
        replay = _LayerReplay(self._layers, self._hidden, plan, buffer)
        with self._views.decoder(depth, replay) as decoder:
            decoder(**self._inputs(ids, plan, buffer))
        replay.check_complete(depth)
        return True

    def launched(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, layer_runner: LayerRunner) -> Tensor:
        """Compute what `logits` does with the same kernels launched one by one, to check the recording."""
        model = model_view(self._model, self._model.get_decoder(), self._lm.n_layers, layer_runner)
        logits: Tensor = model(**self._inputs(ids, plan, buffer), logits_to_keep=1).logits
        return logits[0, -1].float()

    @property
    def last_query(self) -> Tensor:
        """Queries `[1, Hq, R, D]` of the last layer."""
        return self._layers[-1].snapshot.query

    def _inputs(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> dict[str, Any]:
        """Bind the recorded layers to a request and return the arguments of its model.

        If there are fewer rows than were recorded, the first one is computed several times: it sees the fewest keys.
        """
        if not self._request.bind([buffer]):
            raise GraphMismatch
        repeats = self.n_rows - len(ids)
        ids, rows = (torch.cat([tensor[:1].expand(repeats), tensor])[None] for tensor in (ids, plan.rows))
        self._plan.rows.copy_(rows)
        return planned_inputs(ids, self._plan.rows, self._plan.cache(), self._plan)


def _save_query(
    snapshots: dict[int, QuerySnapshot],
    memory: dict[object, Tensor],
    layer: int,
    query: Tensor,
    _key: Tensor,
    params: AttentionParams,
) -> None:
    """Copy the queries of a layer to its snapshot, as part of the recording."""
    if layer not in snapshots:
        kept = _shared_memory(memory, "query", query.transpose(1, 2)).transpose(1, 2)
        snapshots[layer] = QuerySnapshot(kept, params)
    snapshots[layer].query.copy_(query)


def _shared_memory(memory: dict[object, Tensor], purpose: str, like: Tensor) -> Tensor:
    """Return memory for a `[1, R, ..]` tensor, part of the memory of a pass of more rows for the same purpose."""
    key = (purpose, like.shape[2:], like.dtype)
    if key not in memory:
        memory[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    assert like.shape[1] <= memory[key].shape[1], "passes of more rows are recorded first"
    return memory[key][:, : like.shape[1]]


class _LayerRecording:
    """Records the layers one after the other; each reads the hidden states of the layer before."""

    def __init__(self, recorder: Recorder, memory: dict[object, Tensor], snapshots: dict[int, QuerySnapshot]) -> None:
        self._recorder, self._memory, self._snapshots = recorder, memory, snapshots
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.layers: list[LayerGraph] = []
        self.hidden: tuple[Tensor, Tensor]

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a layer."""
        if layer == 0:
            self.hidden = _shared_memory(self._memory, "even", hidden), _shared_memory(self._memory, "odd", hidden)
            self.hidden[0].copy_(hidden)
        before, after = self.hidden[layer % 2], self.hidden[1 - layer % 2]
        args, kwargs = _map_tensors((args, kwargs), self._copy)

        def compute() -> Tensor:
            result = inner(before, *args, **kwargs)
            if not isinstance(result, Tensor):
                raise TypeError(f"a layer returns {type(result).__name__} instead of hidden states")
            return after.copy_(result)

        _, replay = self._recorder.record(compute)
        self.layers.append(LayerGraph(list(_tensors((args, kwargs))), self._snapshots[layer], replay))
        return after

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of an input of a layer; layers with the same input share the copy."""
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, tensor.clone()
        return self._copies[id(tensor)][1]


class _LayerReplay:
    """Runs recorded layers over a request."""

    def __init__(
        self, layers: list[LayerGraph], hidden: tuple[Tensor, Tensor], plan: RowsPlan, buffer: KVBuffer
    ) -> None:
        self._layers, self._hidden = layers, hidden
        self._plan, self._buffer = plan, buffer
        self._copied: dict[int, Tensor] = {}
        self._given: dict[tuple[int, ...], object] = {}
        self._ran = 0

    def check_complete(self, depth: int) -> None:
        """Raise `GraphMismatch` if the number of recorded layers that ran is not `depth`."""
        if self._ran != depth:
            raise GraphMismatch

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a recorded layer once its stored keys and values have arrived, then call the observer of the pass."""
        if self._buffer.wait_for_layer is not None:
            self._buffer.wait_for_layer(layer)
        recorded = self._layers[layer]
        if layer == 0:
            self._hidden[0].copy_(hidden)
        self._copy_inputs(recorded.inputs, (*args, *kwargs.values()))
        recorded.replay()
        self._ran += 1
        observe, snapshot = self._plan.observe, recorded.snapshot
        if observe is not None:
            query = snapshot.query[:, :, -len(self._plan.rows) :]
            key = self._buffer.keys[layer][:, :, : self._plan.length]
            observe(layer, query, key, snapshot.params)
        return self._hidden[1 - layer % 2]

    def _copy_inputs(self, targets: list[Tensor], given: tuple[Any, ...]) -> None:
        """Copy what the layer is given to where it reads it, unless a layer before was given the same objects.

        Raises:
            GraphMismatch: if it is given other tensors than when it was recorded.
        """
        same = (*map(id, targets), *map(id, given))
        if same in self._given:
            return
        self._given[same] = given  # alive, so that no other object has its identity
        inputs = list(_tensors(given))
        if [tensor.shape for tensor in inputs] != [tensor.shape for tensor in targets]:
            raise GraphMismatch
        for target, source in zip(targets, inputs, strict=True):
            if self._copied.get(id(target)) is not source:
                self._copied[id(target)] = source
                target.copy_(source)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a layer's arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a layer's arguments with a function applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_tensors(part, function) for part in value)
    if isinstance(value, dict):
        return {name: _map_tensors(part, function) for name, part in value.items()}
    return value
