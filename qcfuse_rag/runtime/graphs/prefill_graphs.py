"""Fused passes as CUDA graphs: one graph for each layer and number of rows.

Each layer is a graph, because a pass waits between layers for data from its store, and a probe reads the queries of
each layer. A recorded layer reads the positions of its rows and the address of the request's buffer from its own
tensors, so that one graph serves any request of any length. With fewer rows than were recorded, the first row is
computed several times. Only `compile` records passes. It compares each recorded pass with the original before it is
used. A pass without a recording, or whose recording gave another result, is launched kernel by kernel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden, forward_rows, model_inputs
from qcfuse_rag.runtime.graphs.layer_comparison import LayerComparison, LayerTrace, SamplePrompt
from qcfuse_rag.runtime.graphs.layer_graphs import GraphMismatch, LayerGraphs
from qcfuse_rag.runtime.graphs.recorder import (
    REPLAYED,
    CudaRecorder,
    ErrorBound,
    Recorder,
    missing_kernels,
    record_stream,
    recording_refusal,
)
from qcfuse_rag.runtime.kv_table import RebindableKVTable
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.layer_hooks import HookedPass
from qcfuse_rag.runtime.model_views import ViewCache, model_view
from qcfuse_rag.runtime.rows import RowsPlan

ROWS = (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024)
"""Numbers of rows to record. Up to some hundred rows a layer takes as long as reading its weights, so extra rows cost
nothing; above, there are at most a third too many, and from 512 on a sixth. With more rows than the last number,
computing should take longer than launching. None of this has been measured."""

LOG = logging.getLogger(__name__)

T = TypeVar("T")


class PrefillRunner:
    """Computes passes over some rows of a prompt, with recorded layers where they fit.

    Safe to use from several threads: while one thread runs recorded layers, others launch theirs kernel by kernel.

    Args:
        lm: the model.
        recorder: records the layers; None makes a `CudaRecorder` for each recording.
        candidate_views: returns the views of a model to record, in order of preference: the first view whose passes are
            correct is used. None uses the model itself.

    Attributes:
        refusal: why no passes are recorded, or None if some are.
        replayed: the number of passes run with recorded layers so far.
    """

    def __init__(
        self,
        lm: LanguageModel,
        recorder: Recorder | None = None,
        candidate_views: Callable[[PreTrainedModel], Iterable[PreTrainedModel]] | None = None,
    ) -> None:
        self._lm, self._fixed_recorder, self._recorder = lm, recorder, recorder
        self._candidate_views = candidate_views or (lambda model: [model])
        self._graphs: dict[int, LayerGraphs] = {}
        self._lock = threading.Lock()
        self.refusal: str | None = "compile() has not been called"
        self.replayed = 0

    @property
    def most_rows(self) -> int:
        """The largest number of rows that is recorded; 0 without recordings."""
        return max(self._graphs, default=0)

    @torch.inference_mode()
    def logits(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, hooked_pass: HookedPass | None = None) -> Tensor:
        """Compute rows through all layers; see `runtime.forward.forward_rows`. A hooked pass is never replayed."""
        logits = None
        if hooked_pass is None:
            logits = self._replay(ids, plan, lambda graphs: graphs.logits(ids, plan, buffer))
        return forward_rows(self._lm, ids, plan, buffer, hooked_pass) if logits is None else record_stream(logits)

    @torch.inference_mode()
    def hidden(
        self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, *, depth: int, hooked_pass: HookedPass | None = None
    ) -> None:
        """Compute rows through some layers; see `runtime.forward.forward_hidden`."""
        done = None
        if hooked_pass is None:
            done = self._replay(ids, plan, lambda graphs: graphs.hidden(ids, plan, buffer, depth))
        if not done:
            forward_hidden(self._lm, ids, plan, buffer, depth=depth, hooked_pass=hooked_pass)

    def compile(self, rows: Sequence[int] = ROWS) -> None:
        """Record passes; takes memory and seconds.

        Do not use the model elsewhere meanwhile: work of other threads on the device can make a recording fail, and a
        recording can make their work fail.

        Args:
            rows: the numbers of rows to record passes for; those of the model's window or more are left out.
        """
        self._graphs, self.refusal = {}, missing_kernels(self._lm)
        if self.refusal is not None:
            return
        for model in self._candidate_views(self._lm.model):
            self._graphs, self._recorder = {}, self._fixed_recorder  # frees an earlier recorder with all its graphs
            self._graphs, refusals = self._record(model, rows)
            if self._graphs or (self._recorder is not None and self._recorder.broken is not None):
                break
        if refusals:
            reasons = "; ".join(f"{size}: {refusal}" for size, refusal in refusals.items())
            LOG.warning("passes of some numbers of rows are launched kernel by kernel: %s", reasons)
        self.refusal = None if self._graphs else next(iter(refusals.values()), "there are no numbers of rows to record")

    def _record(self, model: PreTrainedModel, rows: Sequence[int]) -> tuple[dict[int, LayerGraphs], dict[int, str]]:
        """Record and check a model; return graphs by number of rows, and reasons for the numbers without graphs."""
        lm = self._lm
        graphs: dict[int, LayerGraphs] = {}
        unread = lm.empty_buffer(1)
        request = RebindableKVTable(unread, lm.shapes, 1, lm.context_window.tokens)
        views = ViewCache(model, model.get_decoder(), lm.n_layers)
        memory: dict[object, Tensor] = {}
        refusals: dict[int, str] = {}
        # The largest number first: the others use a part of its memory.
        sizes = sorted({size for size in rows if size < lm.context_window.tokens}, reverse=True)
        samples: list[SamplePrompt] = []
        for size in sizes:

            def record(size: int = size) -> list[ErrorBound]:
                recorder = self._recorder = self._recorder or CudaRecorder(lm.device)
                graphs[size] = LayerGraphs(lm, model, size, recorder, request, views, memory)
                samples[:] = samples or [SamplePrompt.of(lm, min(2 * sizes[0], lm.context_window.tokens))]
                return self._check(graphs[size], samples[0])

            refusal = recording_refusal(record)
            if refusal is not None:
                refusals[size] = refusal
        return {size: recorded for size, recorded in graphs.items() if size not in refusals}, refusals

    def _replay(self, ids: Tensor, plan: RowsPlan, run: Callable[[LayerGraphs], T]) -> T | None:
        """Run the smallest recorded pass that fits; return None if none fits or another thread runs one."""
        graphs = self._graphs
        fitting = [size for size in graphs if size >= len(plan.rows)]
        # For a whole prompt torch's own attention is faster; sets of visible keys differ in shape with every question.
        if not fitting or ids.dim() != 1 or plan.visible is not None or len(plan.rows) == plan.length:
            return None
        return self._exclusively(lambda: run(graphs[min(fitting)]))

    def _exclusively(self, run: Callable[[], T]) -> T | None:
        assert self._recorder is not None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            with self._recorder.exclusive():
                result = run()
        except GraphMismatch:  # the caller computes all rows again, with the same result
            return None
        finally:
            self._lock.release()
        self.replayed += 1
        return result

    @torch.inference_mode()
    def _check(self, graphs: LayerGraphs, sample: SamplePrompt) -> list[ErrorBound]:
        """Compare a recorded pass with the same kernels launched one by one, and these with the model's own layers.

        Stored keys and values arrive layer by layer. One check has the recorded number of rows, the other has fewer
        rows of a longer prompt.
        """
        lm, size, bounds = self._lm, graphs.n_rows, []
        generator = torch.Generator(lm.device).manual_seed(size)
        for n_rows, length in ((size, size + 1), (max(1, size - size // 4), 2 * size)):
            length = min(length, lm.context_window.tokens)
            others = torch.randperm(length - 1, generator=generator, device=lm.device)[: n_rows - 1].sort().values
            rows = torch.cat([others, torch.tensor([length - 1], device=lm.device)])
            ids, plan = sample.ids[rows], RowsPlan.of(rows, lm.sliding)
            launched, replayed = sample.without(rows, length), sample.without(rows, length)
            for tensor in (*replayed.keys, *replayed.values):
                tensor.fill_(torch.nan)

            def wait_for_layer(layer: int, replayed: KVBuffer = replayed, launched: KVBuffer = launched) -> None:
                replayed.keys[layer].copy_(launched.keys[layer])
                replayed.values[layer].copy_(launched.values[layer])

            loading = replace(replayed, wait_for_layer=wait_for_layer)
            logits = self._exclusively(lambda: graphs.logits(ids, plan, loading))  # noqa: B023
            if logits is None:
                raise RuntimeError("a pass differs from its recording")
            query, trace = graphs.last_query.clone(), LayerTrace()
            launched_logits = graphs.launched(ids, plan, launched, trace)
            bounds += [
                ErrorBound.of(result, expected, REPLAYED[lm.dtype])
                for result, expected in (
                    (logits, launched_logits),
                    (query, graphs.last_query),
                    (replayed.keys[-1][:, :, rows], launched.keys[-1][:, :, rows]),
                    (replayed.values[-1][:, :, rows], launched.values[-1][:, :, rows]),
                )
            ]
            comparison = LayerComparison(trace)
            own = model_view(lm.model, lm.model.get_decoder(), lm.n_layers, comparison)
            expected = own(**model_inputs(ids, plan, launched), logits_to_keep=1).logits[0, -1].float()
            bounds += comparison.bounds(launched_logits, expected)
        return bounds
