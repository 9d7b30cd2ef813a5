"""Fused passes as CUDA graphs: one graph for each layer and number of rows.

Each layer is a graph, because a pass waits between layers for data from its store, and a probe reads the queries of
each layer. A recorded layer reads the positions of its rows and the address of the request's buffer from its own
tensors, so that one graph serves any request of any length. With fewer rows than were recorded, the first row is
computed several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from qcfuse_rag.models.rope import decoder_of
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import planned_inputs
from qcfuse_rag.runtime.graphs.recorder import GraphRecorder, SamplePrompt, recording_refusal
from qcfuse_rag.runtime.kernels.limits import relative_error
from qcfuse_rag.runtime.kv_table import RebindableKVTable
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.model_views import ViewCache, decoder_view
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.runtime.table_plan import TablePlan

Exclusively = Callable[[Callable[[], Tensor]], Tensor | None]
"""Runs something with the device to itself; None if another thread has it, or the pass differs from its recording."""


class GraphMismatch(Exception):
    """A pass gives its layers other inputs than the recorded one."""


QuerySnapshot = tuple[Tensor, AttentionParams]
"""The queries of a layer for its observer: `[1, Hq, R, D]`, and the settings of their attention.

The next layer overwrites the queries; an observer copies them to keep them."""


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
    """The layers of a model recorded for a number of rows.

    All graphs share the table of one request and the views, because only one runs at a time. Graphs of fewer rows share
    the `memory` of more rows, which are recorded first: tensors by purpose and shape.
    """

    @torch.inference_mode()
    def __init__(
        self,
        lm: LanguageModel,
        n_rows: int,
        recorder: GraphRecorder,
        request: RebindableKVTable,
        views: ViewCache,
        memory: dict[object, Tensor],
    ) -> None:
        self.n_rows = n_rows
        self._lm, self._request, self._views = lm, request, views
        rows = torch.zeros(1, n_rows, dtype=torch.int64, device=lm.device)
        request.bind([])  # while recording, layers write to a buffer that nothing reads
        snapshots: dict[int, QuerySnapshot] = {}
        # No reference cycles: graphs are freed with their last reference, not by a collection during another recording.
        self._plan = TablePlan(rows, request.table, lm.sliding, partial(_save_query, snapshots, memory))
        recording = _LayerRecording(recorder, memory, snapshots)
        inputs = planned_inputs(torch.zeros_like(rows), rows, self._plan.cache(), self._plan)
        decoder_view(decoder_of(lm.fused_model), lm.n_layers, recording)(**inputs)
        self._layers, self._hidden = recording.layers, recording.hidden

    def run(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, depth: int | None = None) -> Tensor:
        """Compute rows through all layers, or through some of them; return logits or hidden states.

        Logits are those of `runtime.forward.forward_rows`.

        Raises:
            GraphMismatch: if the pass differs from what was recorded.
        """
        replay = _LayerReplay(self._layers, self._hidden, plan, buffer)
        options = {"logits_to_keep": 1} if depth is None else {}
        with self._views.computed_by(replay, depth) as model:
            out = model(**self._inputs(ids, plan, buffer), **options)
        if replay.ran != (self._lm.n_layers if depth is None else depth):
            raise GraphMismatch
        found: Tensor = out.logits[0, -1].float() if depth is None else out[0]
        return found

    def launched(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> Tensor:
        """Compute what `run` does with the same kernels launched one by one, to check the recording."""
        logits: Tensor = self._lm.fused_model(**self._inputs(ids, plan, buffer), logits_to_keep=1).logits
        return logits[0, -1].float()

    @property
    def last_query(self) -> Tensor:
        """Queries `[1, Hq, R, D]` of the last layer."""
        return self._layers[-1].snapshot[0]

    def _inputs(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer) -> dict[str, Any]:
        """Bind the recorded layers to a request and return the arguments of its model.

        If there are fewer rows than were recorded, the first one is computed several times: it sees the fewest keys.
        """
        self._request.bind([buffer])
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
    if layer not in snapshots:
        copy = _shared_memory(memory, "query", query.transpose(1, 2)).transpose(1, 2)
        snapshots[layer] = copy, params
    snapshots[layer][0].copy_(query)


def _shared_memory(memory: dict[object, Tensor], purpose: str, like: Tensor) -> Tensor:
    """Return memory for a `[1, R, ..]` tensor, part of the memory of a pass of more rows for the same purpose."""
    key = (purpose, like.shape[2:], like.dtype)
    if key not in memory:
        memory[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    assert like.shape[1] <= memory[key].shape[1], "passes of more rows are recorded first"
    return memory[key][:, : like.shape[1]]


class _LayerRecording:
    """Records the layers one after the other; each reads the hidden states of the layer before."""

    def __init__(
        self, recorder: GraphRecorder, memory: dict[object, Tensor], snapshots: dict[int, QuerySnapshot]
    ) -> None:
        self._recorder, self._memory, self._snapshots = recorder, memory, snapshots
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.layers: list[LayerGraph] = []
        self.hidden: tuple[Tensor, Tensor]

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if layer == 0:
            self.hidden = _shared_memory(self._memory, "even", hidden), _shared_memory(self._memory, "odd", hidden)
            self.hidden[0].copy_(hidden)
        before, after = self.hidden[layer % 2], self.hidden[1 - layer % 2]
        args, kwargs = tree_map_only(Tensor, self._copy, (args, kwargs))

        def compute() -> Tensor:
            result = inner(before, *args, **kwargs)
            if not isinstance(result, Tensor):
                raise TypeError(f"a layer returns {type(result).__name__} instead of hidden states")
            return after.copy_(result)

        _, replay = self._recorder.record(compute)
        self.layers.append(LayerGraph(_tensors((args, kwargs)), self._snapshots[layer], replay))
        return after

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of an input of a layer; layers with the same input share the copy."""
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, tensor.clone()
        return self._copies[id(tensor)][1]


class _LayerReplay:
    def __init__(
        self, layers: list[LayerGraph], hidden: tuple[Tensor, Tensor], plan: RowsPlan, buffer: KVBuffer
    ) -> None:
        self._layers, self._hidden = layers, hidden
        self._plan, self._buffer = plan, buffer
        self._copied: dict[int, Tensor] = {}
        self._given: dict[tuple[int, ...], object] = {}
        self.ran = 0

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a recorded layer once its stored keys and values have arrived, then call the observer of the pass."""
        if self._buffer.wait_for_layer is not None:
            self._buffer.wait_for_layer(layer)
        recorded = self._layers[layer]
        if layer == 0:
            self._hidden[0].copy_(hidden)
        self._copy_inputs(recorded.inputs, (*args, *kwargs.values()))
        recorded.replay()
        self.ran += 1
        if self._plan.observe is not None:
            query, params = recorded.snapshot
            key = self._buffer.keys[layer][:, :, : self._plan.length]
            self._plan.observe(layer, query[:, :, -len(self._plan.rows) :], key, params)
        return self._hidden[1 - layer % 2]

    def _copy_inputs(self, targets: list[Tensor], given: tuple[Any, ...]) -> None:
        """Copy what the layer is given to where it reads it, unless a layer before was given the same objects."""
        same = (*map(id, targets), *map(id, given))
        if same in self._given:
            return
        self._given[same] = given  # alive, so that no other object has its identity
        inputs = _tensors(given)
        if [tensor.shape for tensor in inputs] != [tensor.shape for tensor in targets]:
            raise GraphMismatch
        for target, source in zip(targets, inputs, strict=True):
            if self._copied.get(id(target)) is not source:
                self._copied[id(target)] = source
                target.copy_(source)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def record_layers(
    lm: LanguageModel, rows: Sequence[int], open_recorder: Callable[[], GraphRecorder], exclusively: Exclusively
) -> tuple[dict[int, LayerGraphs], dict[int, str]]:
    """Record and check passes; return graphs by number of rows, and reasons for those without graphs."""
    if lm.n_sharing:  # a replayed layer hands nothing to the layers that read its keys
        return {}, dict.fromkeys(rows, "some layers read the keys and values of another")
    graphs: dict[int, LayerGraphs] = {}
    request = RebindableKVTable(lm.empty_buffer(1), lm.shapes, 1, lm.context_window.tokens)
    views = ViewCache(lm.fused_model, decoder_of(lm.fused_model))
    memory: dict[object, Tensor] = {}
    refusals: dict[int, str] = {}
    # The largest number first: the others use a part of its memory.
    sizes = sorted({size for size in rows if size < lm.context_window.tokens}, reverse=True)
    samples: list[SamplePrompt] = []
    for size in sizes:

        def record(size: int = size) -> list[float]:
            graphs[size] = LayerGraphs(lm, size, open_recorder(), request, views, memory)
            samples[:] = samples or [SamplePrompt.of(lm, min(2 * sizes[0], lm.context_window.tokens))]
            return _errors(lm, graphs[size], samples[0], exclusively)

        refusal = recording_refusal(lm, record)
        if refusal is not None:
            refusals[size] = refusal
    return {size: recorded for size, recorded in graphs.items() if size not in refusals}, refusals


@torch.inference_mode()
def _errors(lm: LanguageModel, graphs: LayerGraphs, sample: SamplePrompt, exclusively: Exclusively) -> list[float]:
    """Return the errors of a recorded pass against the same kernels launched one by one.

    The second pass has fewer rows, of a longer prompt.
    """
    size, errors = graphs.n_rows, []
    generator = torch.Generator(lm.device).manual_seed(size)
    for n_rows, length in ((size, size + 1), (max(1, size - size // 4), 2 * size)):
        length = min(length, lm.context_window.tokens)
        others = torch.randperm(length - 1, generator=generator, device=lm.device)[: n_rows - 1].sort().values
        rows = torch.cat([others, torch.tensor([length - 1], device=lm.device)])
        ids, plan = sample.ids[rows], RowsPlan.of(rows, lm.sliding)
        launched, replayed = sample.without(rows, length), sample.without(rows, length)
        logits = exclusively(lambda: graphs.run(ids, plan, replayed))  # noqa: B023
        if logits is None:
            raise RuntimeError("a pass differs from its recording")
        query = graphs.last_query.clone()
        errors += [
            relative_error(logits, graphs.launched(ids, plan, launched)),
            relative_error(query, graphs.last_query),
        ]
        for ours, theirs in ((replayed.keys, launched.keys), (replayed.values, launched.values)):
            errors.append(relative_error(ours[-1][:, :, rows], theirs[-1][:, :, rows]))
    return errors
