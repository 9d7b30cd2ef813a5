"""Decode steps as CUDA graphs.

A recorded step reads its tokens, positions and buffer addresses from its own tensors, so that one graph serves any
requests of any length, up to a number of requests. Only `compile` records steps. It records the first view of the
model whose steps are correct: each recorded step is compared with the original before it is used. A step without a
recording, or whose recording gave another result, is launched kernel by kernel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.decode_step import forward_plan, forward_step
from qcfuse_rag.runtime.graphs.layer_comparison import LayerComparison, LayerTrace, SamplePrompt
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
from qcfuse_rag.runtime.model_views import model_view
from qcfuse_rag.runtime.step_plan import StepPlan
from qcfuse_rag.runtime.table_plan import TablePlan

REQUESTS = (1, 2, 4, 8, 16)
"""Numbers of requests to record; the scheduler decodes up to 16 together."""
CHECKED_POSITIONS = (5, 6, 200)
"""Positions at which a recorded step is checked: it must not depend on the position at which it was recorded."""

LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StepGraph:
    """A recorded step.

    Attributes:
        inputs: `[2, B]` int64 tokens and positions, read by the step.
        requests: the table of the buffers that the step reads and writes.
        plan: the plan that was recorded.
        logits: `[B, vocabulary]` float32, written by the step.
        replay: computes the step.
    """

    inputs: Tensor
    requests: RebindableKVTable
    plan: TablePlan
    logits: Tensor
    replay: Callable[[], None]


class DecodeRunner:
    """Computes decode steps, with a recorded step where one fits.

    Safe to use from several threads; only one recorded step runs at a time.

    Args:
        lm: the model.
        recorder: records the steps; None makes a `CudaRecorder` for each recording.
        candidate_views: returns the views of a model to record, in order of preference: the first view whose steps are
            correct is used. None uses the model itself.

    Attributes:
        model: the view of the model whose steps are recorded; without recordings the model itself.
        refusal: why no steps are recorded, or None if they are.
    """

    def __init__(
        self,
        lm: LanguageModel,
        recorder: Recorder | None = None,
        candidate_views: Callable[[PreTrainedModel], Iterable[PreTrainedModel]] | None = None,
    ) -> None:
        self._lm, self._fixed_recorder, self._recorder = lm, recorder, recorder
        self._candidate_views = candidate_views or (lambda model: [model])
        self._graphs: dict[int, StepGraph] = {}
        self.model = lm.model
        self._lock = threading.Lock()
        self.refusal: str | None = "compile() has not been called"

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]) -> Tensor:
        """Compute the next row of each request; see `runtime.decode_step.forward_step`."""
        fitting = [count for count in self._graphs if count >= len(tokens)]
        logits = self._replay(self._graphs[min(fitting)], tokens, positions, buffers) if fitting else None
        return forward_step(self._lm, tokens, positions, buffers) if logits is None else logits

    def compile(self, requests: Sequence[int] = REQUESTS) -> None:
        """Record decode steps; takes memory and seconds.

        Do not use the model elsewhere meanwhile: work of other threads on the device can make a recording fail, and a
        recording can make their work fail.

        Args:
            requests: the numbers of requests to record steps for.
        """
        self._graphs, self.refusal = {}, missing_kernels(self._lm)
        if self.refusal is not None:
            return
        for model in self._candidate_views(self._lm.model):
            self.refusal = self._record(model, requests)
            if self.refusal is None:
                return
            if self._is_broken:
                break
        self._graphs, self.model, self._recorder = {}, self._lm.model, None
        LOG.warning("decode steps are launched kernel by kernel: %s", self.refusal)

    def _record(self, model: PreTrainedModel, requests: Sequence[int]) -> str | None:
        """Record and check steps of a view of the model; return why they cannot be used, or None if they can."""
        self.model, self._recorder = model, self._fixed_recorder  # frees an earlier recorder with all its graphs
        graphs: dict[int, StepGraph] = {}

        def record() -> list[ErrorBound]:
            recorder = self._recorder = self._fixed_recorder or CudaRecorder(self._lm.device)
            graphs.update({count: self._record_step(count, recorder) for count in requests})
            length = min(max(CHECKED_POSITIONS) + 1, self._lm.context_window.tokens)
            samples = [SamplePrompt.of(self._lm, length, seed) for seed in range(max(requests, default=0))]
            return [bound for graph in graphs.values() for bound in self._check(graph, samples)]

        refusal = recording_refusal(record)
        self._graphs = graphs if refusal is None else {}
        return refusal

    @property
    def _is_broken(self) -> bool:
        return self._recorder is not None and self._recorder.broken is not None

    @torch.inference_mode()
    def _record_step(self, requests: int, recorder: Recorder) -> StepGraph:
        lm = self._lm
        inputs = torch.zeros(2, requests, dtype=torch.int64, device=lm.device)
        unread = lm.empty_buffer(1)
        table = RebindableKVTable(unread, lm.shapes, requests, lm.context_window.tokens)
        plan = TablePlan(inputs[1][:, None], table.table, lm.sliding)
        logits, replay = recorder.record(lambda: forward_plan(self.model, inputs[0], plan))
        return StepGraph(inputs, table, plan, logits, replay)

    def _replay(
        self, graph: StepGraph, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]
    ) -> Tensor | None:
        """Compute a step with a recorded one; return None if the buffers are not aligned as its kernels expect."""
        assert self._recorder is not None
        empty = graph.inputs.shape[1] - len(tokens)
        inputs = torch.tensor([[*tokens, *[0] * empty], [*positions, *[0] * empty]])
        with self._lock:
            with self._recorder.exclusive():
                if not graph.requests.bind(buffers):
                    return None
                graph.inputs.copy_(inputs, non_blocking=True)
                graph.replay()
                logits = graph.logits[: len(tokens)].clone()
            return record_stream(logits)

    @torch.inference_mode()
    def _check(self, graph: StepGraph, samples: Sequence[SamplePrompt]) -> list[ErrorBound]:
        """Compare a recorded step with the step launched kernel by kernel, and that with the model's own layers.

        Requests have different prompts and lengths. If the step is for several requests, one check leaves a request
        out.
        """
        lm, bounds, size = self._lm, [], graph.inputs.shape[1]
        for round_, last in enumerate(min(position, lm.context_window.tokens - 1) for position in CHECKED_POSITIONS):
            positions = [max(0, last - 3 * request) for request in range(max(1, size - round_ % 2))]
            prompts = samples[: len(positions)]
            tokens = [int(prompt.ids[position]) for prompt, position in zip(prompts, positions, strict=True)]
            buffers = [
                prompt.without(torch.tensor([position], device=lm.device), last + 1)
                for prompt, position in zip(prompts, positions, strict=True)
            ]
            replayed = self._replay(graph, tokens, positions, buffers)
            if replayed is None:
                raise RuntimeError("buffers are not aligned")
            trace, inputs = LayerTrace(), graph.inputs[:, : len(positions)]
            view = model_view(self.model, self.model.get_decoder(), lm.n_layers, trace)
            launched = forward_plan(view, graph.inputs[0], graph.plan)[: len(positions)]
            comparison = LayerComparison(trace)
            own = model_view(lm.model, lm.model.get_decoder(), lm.n_layers, comparison)
            plan = StepPlan(buffers, inputs[1][:, None], tuple(positions), lm.sliding)
            expected = forward_plan(own, inputs[0], plan)
            bounds += [ErrorBound.of(replayed, launched, REPLAYED[lm.dtype]), *comparison.bounds(launched, expected)]
        return bounds
