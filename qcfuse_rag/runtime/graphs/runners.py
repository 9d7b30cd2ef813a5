"""Run passes and decode steps, by a recording where one fits, and kernel by kernel otherwise.

Only `compile` records. Before a recording is used, its results are compared with those of the same kernels launched one
by one. Importing this module needs no GPU, and no other module that records.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden, forward_rows, forward_step
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.layer_hooks import HookedPass
from qcfuse_rag.runtime.rows import RowsPlan

if TYPE_CHECKING:
    from qcfuse_rag.runtime.graphs.layers import LayerGraphs
    from qcfuse_rag.runtime.graphs.recorder import GraphRecorder
    from qcfuse_rag.runtime.graphs.steps import StepGraph

ROWS = (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024)
"""Numbers of rows to record. Up to some hundred rows a layer takes as long as reading its weights, so extra rows cost
nothing; above, there are at most a third too many, and from 512 on a sixth. With more rows than the last number,
computing should take longer than launching. None of this has been measured."""
REQUESTS = (1, 2, 4, 8, 16)
"""Numbers of requests to record steps for; the scheduler decodes up to 16 together."""

LOG = logging.getLogger(__name__)

GraphT = TypeVar("GraphT")


class GraphRunner(ABC, Generic[GraphT]):
    """The base of both runners: it records several sizes and keeps the recordings by size.

    Args:
        lm: the model.
        recorder: records; None makes a `GraphRecorder` whenever something is recorded.

    Attributes:
        refusal: why nothing is recorded, or None.
    """

    what: ClassVar[str]
    sizes: ClassVar[Sequence[int]]

    def __init__(self, lm: LanguageModel, recorder: GraphRecorder | None = None) -> None:
        self._lm, self._fixed_recorder, self._recorder = lm, recorder, recorder
        self._graphs: dict[int, GraphT] = {}
        self._lock = threading.Lock()
        self.refusal: str | None = "compile() has not been called"

    def compile(self, sizes: Sequence[int] | None = None) -> None:
        """Record the sizes that can be recorded, of the usual ones or of others; takes memory and seconds.

        Do not use the model elsewhere meanwhile: work of other threads on the device can make a recording fail, and a
        recording can make their work fail.
        """
        from qcfuse_rag.runtime.graphs.recorder import missing_kernels

        self._graphs, self._recorder = {}, self._fixed_recorder  # frees an earlier recorder with all its graphs
        self.refusal = missing_kernels(self._lm)
        if self.refusal is not None:
            return
        self._graphs, refusals = self._record(self.sizes if sizes is None else sizes)
        if refusals:
            reasons = "; ".join(f"{size}: {refusal}" for size, refusal in refusals.items())
            LOG.warning("%s of some sizes are launched kernel by kernel: %s", self.what, reasons)
        if not self._graphs:
            self._recorder, self.refusal = None, next(iter(refusals.values()), "there is no size to record")

    @abstractmethod
    def _record(self, sizes: Sequence[int]) -> tuple[dict[int, GraphT], dict[int, str]]:
        """Record and check; return recordings by size, and reasons for the sizes without one."""

    def _fitting(self, size: int) -> GraphT | None:
        """Return the smallest recording of at least this size, if there is one."""
        graphs = self._graphs  # another thread may replace them
        fitting = [recorded for recorded in graphs if recorded >= size]
        return graphs[min(fitting)] if fitting else None

    def _open_recorder(self) -> GraphRecorder:
        from qcfuse_rag.runtime.graphs.recorder import GraphRecorder

        self._recorder = self._recorder or GraphRecorder(self._lm.device)
        return self._recorder


class PrefillRunner(GraphRunner["LayerGraphs"]):
    """Computes passes over some rows of a prompt, with recorded layers where they fit.

    Passes of the model's window of rows or more are not recorded.

    Safe to use from several threads: while one thread runs recorded layers, others launch theirs kernel by kernel.

    Attributes:
        replayed: the number of passes run with recorded layers so far.
    """

    what, sizes = "passes", ROWS
    replayed = 0

    @property
    def most_rows(self) -> int:
        """The largest number of rows that is recorded; 0 without recordings."""
        return max(self._graphs, default=0)

    @torch.inference_mode()
    def logits(self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, hooked_pass: HookedPass | None = None) -> Tensor:
        """Compute rows through all layers; see `runtime.forward.forward_rows`. A hooked pass is never replayed."""
        logits = None
        if hooked_pass is None:
            logits = self._replay(ids, plan, lambda graphs: graphs.run(ids, plan, buffer))
        if logits is None:
            return forward_rows(self._lm, ids, plan, buffer, hooked_pass)
        return used_by_caller(logits)

    @torch.inference_mode()
    def hidden(
        self, ids: Tensor, plan: RowsPlan, buffer: KVBuffer, *, depth: int, hooked_pass: HookedPass | None = None
    ) -> None:
        """Compute rows through some layers; see `runtime.forward.forward_hidden`."""
        done = None
        if hooked_pass is None:
            done = self._replay(ids, plan, lambda graphs: graphs.run(ids, plan, buffer, depth))
        if done is None:
            forward_hidden(self._lm, ids, plan, buffer, depth=depth, hooked_pass=hooked_pass)

    def _record(self, sizes: Sequence[int]) -> tuple[dict[int, LayerGraphs], dict[int, str]]:
        from qcfuse_rag.runtime.graphs.layers import record_layers

        return record_layers(self._lm, sizes, self._open_recorder, self._exclusively)

    def _replay(self, ids: Tensor, plan: RowsPlan, run: Callable[[LayerGraphs], Tensor]) -> Tensor | None:
        """Run the smallest recorded pass that fits; return None if none fits or another thread runs one."""
        graphs = self._fitting(len(plan.rows))
        # For a whole prompt torch's own attention is faster; sets of visible keys differ in shape with every question.
        if graphs is None or ids.dim() != 1 or plan.visible is not None or len(plan.rows) == plan.length:
            return None
        return self._exclusively(lambda: run(graphs))

    def _exclusively(self, run: Callable[[], Tensor]) -> Tensor | None:
        from qcfuse_rag.runtime.graphs.layers import GraphMismatch

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


class DecodeRunner(GraphRunner["StepGraph"]):
    """Computes decode steps, with a recorded step where one fits; safe to use from several threads.

    All steps that are recorded are correct, or none is used.
    """

    what, sizes = "decode steps", REQUESTS

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]) -> Tensor:
        """Compute the next row of each request; see `runtime.forward.forward_step`."""
        graph = self._fitting(len(tokens))
        if graph is None:
            return forward_step(self._lm, tokens, positions, buffers)
        return self._replay(graph, tokens, positions, buffers)

    def _record(self, sizes: Sequence[int]) -> tuple[dict[int, StepGraph], dict[int, str]]:
        from qcfuse_rag.runtime.graphs.steps import record_steps

        return record_steps(self._lm, sizes, self._open_recorder, self._replay)

    def _replay(
        self, graph: StepGraph, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]
    ) -> Tensor:
        assert self._recorder is not None
        empty = graph.inputs.shape[1] - len(tokens)
        inputs = torch.tensor([[*tokens, *[0] * empty], [*positions, *[0] * empty]])
        with self._lock:
            with self._recorder.exclusive():
                graph.requests.bind(buffers)
                graph.inputs.copy_(inputs, non_blocking=True)
                graph.replay()
                logits = graph.logits[: len(tokens)].clone()
            return used_by_caller(logits)


def used_by_caller(result: Tensor) -> Tensor:
    """Tell torch's allocator that the caller's stream will use the result of an exclusive block; return the result."""
    if result.is_cuda:
        result.record_stream(torch.cuda.current_stream(result.device))
    return result
