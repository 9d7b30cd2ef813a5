"""Fused passes as CUDA graphs: one for each layer and number of rows.

A layer at a time, because a pass waits between layers for what its store has not brought yet, and a probe looks at what
each has found. A recorded layer takes its rows' positions and the place of the request's buffer from tensors of its
own, so one serves any request, at any length. Where there are fewer rows than were recorded, the last one is computed
several times. Passes are recorded by `compile` only, and each is compared with the pass it stands for before it is
used; what is not recorded, or came out otherwise, is launched kernel by kernel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden, forward_rows
from qcfuse_rag.runtime.fused_layers.fused_modules import leanest_first
from qcfuse_rag.runtime.graphs.layer_graphs import GraphMismatch
from qcfuse_rag.runtime.graphs.layer_graphs import LayerGraphs
from qcfuse_rag.runtime.graphs.recorder import (
    LOOSE,
    STRICT,
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
from qcfuse_rag.runtime.model_views import ViewCache
from qcfuse_rag.runtime.rows import RowsPlan

ROWS = (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Numbers of rows to record. Up to some hundred a layer takes as long as it takes to read its weights, so rows are for
nothing; from there on there are at most a third too many. With more than the last, computing should take longer than
launching; neither has been measured."""

LOG = logging.getLogger(__name__)

T = TypeVar("T")


class PrefillRunner:
    """Computes passes over some rows of a prompt, by recorded layers where there are some that fit.

    Safe to use from several threads: while one of them runs recorded layers, others launch theirs kernel by kernel.

    Args:
        lm: the model.
        recorder: a `CudaRecorder` by default.

    Attributes:
        refusal: why no passes are recorded, or None if some are.
        replayed: how many passes were run by recorded layers so far.
    """

    def __init__(self, lm: LanguageModel, recorder: Recorder | None = None) -> None:
        self._lm, self._given, self._recorder = lm, recorder, recorder
        self._graphs: dict[int, LayerGraphs] = {}
        self._turn = threading.Lock()
        self.refusal: str | None = "they are recorded by `compile`"
        self.replayed = 0

    @torch.inference_mode()
    def forward_rows(
        self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, hooked_pass: HookedPass | None = None
    ) -> Tensor:
        """Compute rows through all layers; see `runtime.forward.forward_rows`. A pass that is steered is not recorded."""
        logits = None
        if hooked_pass is None:
            logits = self._replayed(ids, plan, lambda graphs: graphs.logits(ids, plan, buffer))
        return forward_rows(self._lm, ids, plan, buffer, hooked_pass) if logits is None else record_stream(logits)

    @torch.inference_mode()
    def forward_hidden(
        self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, *, depth: int, hooked_pass: HookedPass | None = None
    ) -> None:
        """Compute rows through some layers; see `runtime.forward.forward_hidden`."""
        done = None
        if hooked_pass is None:
            done = self._replayed(ids, plan, lambda graphs: graphs.hidden(ids, plan, buffer, depth))
        if not done:
            forward_hidden(self._lm, ids, plan, buffer, depth=depth, hooked_pass=hooked_pass)

    def compile(self, rows: Sequence[int] = ROWS) -> None:
        """Record passes of so many rows; takes memory and seconds.

        Not while the model is used otherwise: what other threads do on the device can end a recording, and a recording
        what they do.

        Args:
            rows: how many rows passes are recorded for, as far as they are fewer than the model's window.
        """
        self._graphs, self.refusal = {}, missing_kernels(self._lm)
        if self.refusal is not None:
            return
        for model in leanest_first(self._lm.model):
            self._graphs, self._recorder = {}, self._given  # an earlier one goes with all it has recorded
            self._graphs, refusals = self._recorded(model, rows)
            if not refusals or (self._recorder is not None and self._recorder.broken is not None):
                break
        if refusals:
            said = "; ".join(f"{size}: {refusal}" for size, refusal in refusals.items())
            LOG.warning("passes of some numbers of rows are launched kernel by kernel: %s", said)
        self.refusal = None if self._graphs else next(iter(refusals.values()), "there are no numbers of rows to record")

    def _recorded(self, model: PreTrainedModel, rows: Sequence[int]) -> tuple[dict[int, LayerGraphs], dict[int, str]]:
        """Record a model; return what there is for each number of rows, and why there is nothing for others."""
        lm = self._lm
        graphs: dict[int, LayerGraphs] = {}
        unread = KVBuffer.allocate(lm.shapes, 1, dtype=lm.dtype, device=lm.device)
        request = RebindableKVTable(unread, lm.shapes, 1, lm.window.tokens)
        views = ViewCache(model, model.get_decoder(), lm.n_layers)
        memory: dict[object, Tensor] = {}
        refusals: dict[int, str] = {}
        # The largest first: the others take a part of its memory.
        for size in sorted({size for size in rows if size < lm.window.tokens}, reverse=True):

            def record(size: int = size) -> list[ErrorBound]:
                recorder = self._recorder = self._recorder or CudaRecorder(lm.device)
                graphs[size] = LayerGraphs(lm, model, size, recorder, request, views, memory)
                return self._compared(graphs[size])

            refusal = recording_refusal(record)
            if refusal is not None:
                refusals[size] = refusal
        return {size: one for size, one in graphs.items() if size not in refusals}, refusals

    def _replayed(self, ids: Tensor, plan: RowsPlan, run: Callable[[LayerGraphs], T]) -> T | None:
        """Run the smallest recorded pass that fits; None if none does, or somebody else runs one."""
        graphs = self._graphs
        fitting = [size for size in graphs if size >= len(plan.rows)]
        # Of a whole prompt torch's own attention is faster; sets of visible keys differ in shape with every question.
        if not fitting or ids.dim() != 1 or plan.visible is not None or len(plan.rows) == plan.length:
            return None
        return self._taking_turns(lambda: run(graphs[min(fitting)]))

    def _taking_turns(self, run: Callable[[], T]) -> T | None:
        assert self._recorder is not None
        if not self._turn.acquire(blocking=False):
            return None
        try:
            with self._recorder.turn():
                result = run()
        except GraphMismatch:  # rows that were computed are computed again, the same
            return None
        finally:
            self._turn.release()
        self.replayed += 1
        return result

    @torch.inference_mode()
    def _compared(self, graphs: LayerGraphs) -> list[ErrorBound]:
        """Compare a recorded pass with the pass it stands for, over random keys and values that arrive on its way.

        Once with as many rows as were recorded, and once with fewer of a longer prompt.
        """
        lm, size, found = self._lm, graphs.n_rows, []
        generator = torch.Generator(lm.device).manual_seed(size)
        for n_rows, length in ((size, size + 1), (max(1, size - size // 4), 2 * size)):
            length = min(length, lm.window.tokens)
            others = torch.randperm(length - 1, generator=generator, device=lm.device)[: n_rows - 1].sort().values
            rows = torch.cat([others, torch.tensor([length - 1], device=lm.device)])
            ids = torch.arange(len(rows), device=lm.device) % lm.model.get_input_embeddings().num_embeddings
            buffers = [KVBuffer.allocate(lm.shapes, length, dtype=lm.dtype, device=lm.device) for _ in range(2)]
            ours, theirs = buffers
            for mine, yours in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
                mine.fill_(torch.nan)
                yours.normal_(generator=generator)

            def wait_for_layer(layer: int, ours: KVBuffer = ours, theirs: KVBuffer = theirs) -> None:
                ours.keys[layer].copy_(theirs.keys[layer])
                ours.values[layer].copy_(theirs.values[layer])

            plan = RowsPlan.of(rows, lm.sliding)
            arriving = replace(ours, wait_for_layer=wait_for_layer)
            logits = self._taking_turns(lambda: graphs.logits(ids, plan, arriving))  # noqa: B023
            if logits is None:
                raise RuntimeError("a pass is not as it was recorded")
            query = graphs.last_query.clone()
            found.append(ErrorBound.of(logits, graphs.launched(ids, plan, theirs), STRICT))
            found.append(ErrorBound.of(query, graphs.last_query, STRICT))
            for side in ("keys", "values"):
                mine, yours = (getattr(buffer, side)[-1][:, :, rows] for buffer in buffers)
                found.append(ErrorBound.of(mine, yours, STRICT))
            found.append(ErrorBound.of(logits, forward_rows(lm, ids, plan, theirs), LOOSE[lm.dtype]))
        return found
