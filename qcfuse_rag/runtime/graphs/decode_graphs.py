"""Decode steps as CUDA graphs.

A recorded step takes its tokens, positions and the places of its requests' buffers from tensors of its own, so one
serves any requests, of any length, up to so many. Steps are recorded by `compile` only, by the view of the model that
proves fastest, and each is compared with the step it stands for before it is used; what is not recorded, or came out
otherwise, is launched kernel by kernel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.decode_step import forward_plan, forward_step
from qcfuse_rag.runtime.fused_layers.fused_decoder_layer import leanest_steps
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
from qcfuse_rag.runtime.loading.device_timer import DeviceTimestamp
from qcfuse_rag.runtime.table_plan import TablePlan

REQUESTS = (1, 2, 4, 8)
CHECKED_POSITIONS = (5, 6, 200)
"""Positions at which a recorded step is compared; it must not have kept the one it was recorded at."""
TIMED_STEPS, TIMED_ROUNDS = 10, 3
"""So many steps one after the other are timed so often to find the fastest view."""

LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StepGraph:
    """A recorded step.

    Attributes:
        given: `[2, B]` int64, tokens and positions, read by the step.
        requests: whose buffers are read and written.
        plan: what was recorded.
        logits: `[B, vocabulary]` float32, written by the step.
        replay: computes the step.
    """

    given: Tensor
    requests: RebindableKVTable
    plan: TablePlan
    logits: Tensor
    replay: Callable[[], None]


class DecodeRunner:
    """Computes decode steps, by a recorded one where there is one that fits.

    Safe to use from several threads; recorded steps take turns.

    Args:
        lm: the model.
        recorder: a `CudaRecorder` by default.

    Attributes:
        model: or the view of it by which steps are recorded.
        seconds: what a recorded step takes, by view of the model and number of requests, where there was a choice; see
            `lean_layer.leanest_steps`.
        refusal: why no steps are recorded, or None if they are.
    """

    def __init__(self, lm: LanguageModel, recorder: Recorder | None = None) -> None:
        self._lm, self._given, self._recorder = lm, recorder, recorder
        self._graphs: dict[int, StepGraph] = {}
        self.model = lm.model
        self._turn = threading.Lock()
        self.seconds: dict[str, dict[int, float]] = {}
        self.refusal: str | None = "they are recorded by `compile`"

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]) -> Tensor:
        """Compute the next row of each request; see `runtime.decode_step.forward_step`."""
        graphs = self._graphs
        fitting = [count for count in graphs if count >= len(tokens)]
        logits = self._replayed(graphs[min(fitting)], tokens, positions, buffers) if fitting else None
        return forward_step(self._lm, tokens, positions, buffers) if logits is None else logits

    def compile(self, requests: Sequence[int] = REQUESTS) -> None:
        """Record steps of so many requests; takes memory and seconds.

        Not while the model is used otherwise: what other threads do on the device can end a recording, and a recording
        what they do.

        Args:
            requests: how many requests steps are recorded for.
        """
        self._graphs, self.refusal = {}, missing_kernels(self._lm)
        if self.refusal is not None:
            return
        for model in self._fastest_first(requests):
            self.refusal = self._record(model, requests)
            if self.refusal is None:
                return
            if self._broken:
                break
        self._graphs, self.model, self._recorder = {}, self._lm.model, None
        LOG.warning("decode steps are launched kernel by kernel: %s", self.refusal)

    def _fastest_first(self, requests: Sequence[int]) -> list[PreTrainedModel]:
        """Return views of the model whose steps come out right, by the time they take for the fewest and most requests.

        None of them if trying them has left nothing to record by.
        """
        views, self.seconds = leanest_steps(self._lm.model), {}
        if len(views) == 1 or not requests:
            return list(views.values())
        for name, view in views.items():
            self.refusal = self._record(view, sorted({min(requests), max(requests)}), timed=name)
            if self._broken:
                return []
        LOG.info("seconds a step, by view of the model and number of requests: %s", self.seconds)
        return [views[name] for name in sorted(self.seconds, key=lambda name: sum(self.seconds[name].values()))]

    def _record(self, model: PreTrainedModel, requests: Sequence[int], *, timed: str | None = None) -> str | None:
        """Record steps of a view of the model; return why they are not to be used, or None if they are.

        Args:
            model: the view.
            requests: how many each step is for.
            timed: under what name to note what they take, if they come out right; None does not.
        """
        self.model, self._recorder = model, self._given  # an earlier one goes with all it has recorded
        graphs: dict[int, StepGraph] = {}

        def record() -> list[ErrorBound]:
            recorder = self._recorder = self._given or CudaRecorder(self._lm.device)
            graphs.update({count: self._recorded(count, recorder) for count in requests})
            return [one for graph in graphs.values() for one in self._compared(graph)]

        def time() -> list[ErrorBound]:
            self.seconds[str(timed)] = {count: self._seconds(graph) for count, graph in graphs.items()}
            return []

        self._graphs = {}
        refusal = recording_refusal(record)
        if refusal is None and timed is not None:
            refusal = recording_refusal(time)
        if refusal is None:
            self._graphs = graphs
        return refusal

    @property
    def _broken(self) -> bool:
        return self._recorder is not None and self._recorder.broken is not None

    @torch.inference_mode()
    def _seconds(self, graph: StepGraph) -> float:
        """Return what a recorded step takes on the device."""
        assert self._recorder is not None
        lm, count = self._lm, graph.given.shape[1]
        last = min(CHECKED_POSITIONS[-1], lm.window.tokens - 1)
        buffers = [KVBuffer.allocate(lm.shapes, last + 1, dtype=lm.dtype, device=lm.device) for _ in range(count)]
        for held in (held for buffer in buffers for held in (*buffer.keys, *buffer.values)):
            held.zero_()
        self._replayed(graph, [0] * count, [last] * count, buffers)
        rounds = []
        with self._recorder.turn():
            for _ in range(TIMED_ROUNDS):
                begun = DeviceTimestamp.on(lm.device)
                for _ in range(TIMED_STEPS):
                    graph.replay()
                ended = DeviceTimestamp.on(lm.device)
                ended.wait()
                rounds.append(begun.seconds_until(ended) / TIMED_STEPS)
        return min(rounds)

    @torch.inference_mode()
    def _recorded(self, requests: int, recorder: Recorder) -> StepGraph:
        lm = self._lm
        given = torch.zeros(2, requests, dtype=torch.int64, device=lm.device)
        unread = KVBuffer.allocate(lm.shapes, 1, dtype=lm.dtype, device=lm.device)
        moving = RebindableKVTable(unread, lm.shapes, requests, lm.window.tokens)
        plan = TablePlan(given[1][:, None], moving.table, lm.sliding)
        logits, replay = recorder.record(lambda: forward_plan(self.model, given[0], plan))
        return StepGraph(given, moving, plan, logits, replay)

    def _replayed(
        self, graph: StepGraph, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]
    ) -> Tensor | None:
        """Compute a step by a recorded one; None if buffers lie as its kernels do not expect."""
        assert self._recorder is not None
        empty = graph.given.shape[1] - len(tokens)
        given = torch.tensor([[*tokens, *[0] * empty], [*positions, *[0] * empty]])
        with self._turn:
            with self._recorder.turn():
                if not graph.requests.bind(buffers):
                    return None
                graph.given.copy_(given, non_blocking=True)
                graph.replay()
                logits = graph.logits[: len(tokens)].clone()
            return record_stream(logits)

    @torch.inference_mode()
    def _compared(self, graph: StepGraph) -> list[ErrorBound]:
        """Compare a recorded step with the step it stands for, over random keys and values.

        Once with a place left empty, where there are several, and with requests of different lengths.
        """
        lm, found, places = self._lm, [], graph.given.shape[1]
        generator = torch.Generator(lm.device).manual_seed(0)
        for round_, last in enumerate(min(at, lm.window.tokens - 1) for at in CHECKED_POSITIONS):
            positions = [max(0, last - 3 * place) for place in range(max(1, places - round_ % 2))]
            buffers = [KVBuffer.allocate(lm.shapes, last + 1, dtype=lm.dtype, device=lm.device) for _ in positions]
            for buffer in buffers:
                for held in (*buffer.keys, *buffer.values):
                    held.normal_(generator=generator)
            given = ([1 + place for place in range(len(positions))], positions, buffers)
            replayed = self._replayed(graph, *given)
            if replayed is None:
                raise RuntimeError("buffers are not aligned")
            again = forward_plan(self.model, graph.given[0], graph.plan)[: len(positions)]
            found += [
                ErrorBound.of(replayed, again, STRICT),
                ErrorBound.of(replayed, forward_step(lm, *given), LOOSE[lm.dtype]),
            ]
        return found
