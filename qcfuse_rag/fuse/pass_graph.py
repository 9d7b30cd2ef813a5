"""Fused passes as CUDA graphs: one for each layer and number of rows.

A layer at a time, because a pass waits between layers for what its store has not brought yet, and a probe looks at what
each has found. A recorded layer takes its rows' positions and the place of the request's buffer from tensors of its
own, so one serves any request, at any length. Where there are fewer rows than were recorded, the last one is computed
several times. Passes are recorded by `warm_up` only, and each is compared with the pass it stands for before it is
used; what is not recorded, or came out otherwise, is launched kernel by kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.forward import forward_hidden, forward_rows
from qcfuse_rag.fuse.layer_graph import LayerGraphs, NotAsRecorded
from qcfuse_rag.fuse.layerwise import SteeredPass
from qcfuse_rag.fuse.recorder import CudaRecorder, Recorder, recording_refusal
from qcfuse_rag.fuse.rows import RowsPlan
from qcfuse_rag.model.language_model import LanguageModel

ROWS = (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Numbers of rows to record. Up to some hundred a layer takes as long as it takes to read its weights, so rows are for
nothing; from there on there are at most a third too many. With more than the last, computing takes longer than
launching."""

T = TypeVar("T")


class FusedPasses:
    """Computes passes over some rows of a prompt, by recorded layers where there are some that fit.

    Safe to use from several threads: while one of them runs recorded layers, others launch theirs kernel by kernel.

    Args:
        lm: the model.
        recorder: a `CudaRecorder` by default.

    Attributes:
        refusal: why no passes are recorded, or None if they are.
    """

    def __init__(self, lm: LanguageModel, recorder: Recorder | None = None) -> None:
        self._lm, self._recorder = lm, recorder
        self._graphs: dict[int, LayerGraphs] = {}
        self._turn = threading.Lock()
        self.refusal: str | None = "they are recorded by `warm_up`"

    @torch.inference_mode()
    def forward_rows(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, course: SteeredPass | None = None) -> Tensor:
        """Compute rows through all layers; see `fuse.forward.forward_rows`. A pass that is steered is not recorded."""
        logits = None
        if course is None:
            logits = self._replayed(ids, plan, lambda graphs: graphs.logits(ids, plan, buffer))
        return forward_rows(self._lm, ids, plan, buffer, course) if logits is None else logits

    @torch.inference_mode()
    def forward_hidden(
        self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, *, depth: int, course: SteeredPass | None = None
    ) -> None:
        """Compute rows through some layers; see `fuse.forward.forward_hidden`."""
        hidden = None
        if course is None:
            hidden = self._replayed(ids, plan, lambda graphs: graphs.hidden(ids, plan, buffer, depth))
        if hidden is None:
            forward_hidden(self._lm, ids, plan, buffer, depth=depth, course=course)

    def warm_up(self, rows: Sequence[int] = ROWS) -> None:
        """Record passes of so many rows; takes memory and seconds.

        Not while the model is used otherwise: what other threads do on the device can end a recording, and a recording
        what they do.

        Args:
            rows: how many rows passes are recorded for, as far as they are fewer than the model's window.
        """
        self._graphs = {}
        graphs: dict[int, LayerGraphs] = {}
        memory: dict[object, Tensor] = {}
        sizes = sorted({size for size in rows if size < self._lm.window.tokens}, reverse=True)

        def record() -> list[float]:
            self._recorder = self._recorder or CudaRecorder(self._lm.device)
            for size in sizes:  # the largest first: the others take a part of its memory
                graphs[size] = LayerGraphs(self._lm, size, self._recorder, memory)
            return [error for graph in graphs.values() for error in self._errors(graph)]

        self.refusal = recording_refusal(self._lm, "fused passes", record)
        if self.refusal is None:
            self._graphs = graphs

    def _replayed(self, ids: Tensor, plan: RowsPlan, run: Callable[[LayerGraphs], T]) -> T | None:
        """Run the smallest recorded pass that fits; None if none does, or somebody else runs one."""
        fitting = [size for size in self._graphs if size >= len(plan.rows)]
        # Of a whole prompt torch's own attention is faster; sets of visible keys differ in shape with every question.
        if not fitting or ids.dim() != 1 or plan.visible is not None or len(plan.rows) == plan.length:
            return None
        return self._taking_turns(lambda: run(self._graphs[min(fitting)]))

    def _taking_turns(self, run: Callable[[], T]) -> T | None:
        assert self._recorder is not None
        if not self._turn.acquire(blocking=False):
            return None
        try:
            with self._recorder.turn():
                return run()
        except NotAsRecorded:  # rows that were computed are computed again, the same
            return None
        finally:
            self._turn.release()

    @torch.inference_mode()
    def _errors(self, graphs: LayerGraphs) -> list[float]:
        """Return how far a recorded pass is from the one it stands for, over random keys and values.

        Once with as many rows as were recorded, and once with fewer of a longer prompt.
        """
        lm, size, errors = self._lm, graphs.n_rows, []
        generator = torch.Generator().manual_seed(size)
        for n_rows, length in ((size, size + 1), (max(1, size - size // 4), 2 * size)):
            length = min(length, lm.window.tokens)
            others = torch.randperm(length - 1, generator=generator)[: n_rows - 1].sort().values
            rows = torch.cat([others, torch.tensor([length - 1])]).to(lm.device)
            ids = torch.arange(len(rows), device=lm.device) % lm.model.get_input_embeddings().num_embeddings
            buffers = [KVBuffer.allocate(lm.shapes, length, dtype=lm.dtype, device=lm.device) for _ in range(2)]
            for one, other in zip(*((*buffer.keys, *buffer.values) for buffer in buffers), strict=True):
                other.copy_(one.normal_())
            plan = RowsPlan.of(rows, lm.sliding)
            found = self._taking_turns(lambda: graphs.logits(ids, plan, buffers[0]))  # noqa: B023
            if found is None:
                raise RuntimeError("a pass is not as it was recorded")
            expected = forward_rows(lm, ids, plan, buffers[1])
            for one, other in ((found, expected), (buffers[0].keys[-1], buffers[1].keys[-1])):
                errors.append(float((one - other).norm() / other.norm()))
        return errors
