"""Decode steps as CUDA graphs: launching the kernels of a step takes longer than a GPU needs to run them.

A recorded step takes its tokens, positions and the places of its requests' buffers from tensors of its own, so one
serves any requests, of any length, up to so many. Where there are fewer, the places left over write into a buffer that
nobody reads. Steps are recorded by `warm_up` only, and each is compared with the step it stands for before it is used;
what is not recorded, or came out otherwise, is launched kernel by kernel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.kernels.support import TOLERANCE, kernel_refusal, kernels_run_on, widest_head
from qcfuse_rag.fuse.step import StepPlan, forward_plan, forward_step
from qcfuse_rag.fuse.step_table import StepTable, is_aligned, list_places
from qcfuse_rag.model.language_model import LanguageModel

REQUESTS = (1, 2, 4, 8)
TRIED_AT = (5, 6, 200)
"""Positions at which a recorded step is compared; it must not have kept the one it was recorded at."""

LOG = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records what a call computes on a device."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return a call's result, and what computes that again, into the same tensor."""

    def turn(self) -> AbstractContextManager[object]:
        """Have what a thread does meanwhile come after what others did in their turns."""


@dataclass(slots=True, eq=False)
class StepGraph:
    """A recorded step.

    Attributes:
        given: `[2, B]` int64, tokens and positions, read by the step.
        plan: whose rows and table are read by the step; there are no buffers in it.
        logits: `[B, vocabulary]` float32, written by the step.
        replay: computes the step.
        places: what the plan's table says, on the host.
    """

    given: Tensor
    plan: StepPlan
    logits: Tensor
    replay: Callable[[], None]
    places: Tensor


class DecodeSteps:
    """Computes decode steps, by a recorded one where there is one that fits.

    Safe to use from several threads; recorded steps take turns.

    Args:
        lm: the model.
        recorder: a `CudaRecorder` by default.

    Attributes:
        refusal: why no steps are recorded, or None if they are.
    """

    def __init__(self, lm: LanguageModel, recorder: Recorder | None = None) -> None:
        self._lm, self._recorder = lm, recorder
        self._graphs: dict[int, StepGraph] = {}
        self._unread: KVBuffer | None = None
        self._places: WeakKeyDictionary[KVBuffer, Tensor] = WeakKeyDictionary()
        self._turn = threading.Lock()
        self.refusal: str | None = "they are recorded by `warm_up`"

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]) -> Tensor:
        """Compute the next row of each request; see `fuse.step.forward_step`."""
        graphs = self._graphs
        fitting = [count for count in graphs if count >= len(tokens)]
        logits = self._replayed(graphs[min(fitting)], tokens, positions, buffers) if fitting else None
        return forward_step(self._lm, tokens, positions, buffers) if logits is None else logits

    def warm_up(self, requests: Sequence[int] = REQUESTS) -> None:
        """Record steps of so many requests; takes memory and seconds.

        Not while the model is used otherwise: what other threads do on the device can end a recording, and a recording
        what they do.

        Args:
            requests: how many requests steps are recorded for.
        """
        lm, graphs = self._lm, {}
        self._graphs = {}
        try:
            about = (lm.device, lm.dtype, widest_head(lm))
            if not kernels_run_on(*about):
                self.refusal = f"there are no kernels: {kernel_refusal(*about)}"
                return
            self._unread = KVBuffer.allocate(lm.shapes, 1, dtype=lm.dtype, device=lm.device)
            self._recorder = self._recorder or CudaRecorder(lm.device)
            for count in requests:
                graphs[count] = self._recorded(count, self._recorder)
            errors = [error for graph in graphs.values() for error in self._errors(graph)]
        except Exception as error:  # whatever a model does that cannot be recorded; it runs without
            self.refusal = f"they cannot be recorded: {type(error).__name__}: {error}"
        else:
            off = float(torch.tensor(errors).max())  # NaN if any is
            self.refusal = None if off <= TOLERANCE else f"recorded steps are off by {off:.2g}"
        if self.refusal is None:
            self._graphs = graphs
        else:
            LOG.warning("decode steps are launched kernel by kernel: %s", self.refusal)

    @torch.inference_mode()
    def _recorded(self, requests: int, recorder: Recorder) -> StepGraph:
        lm = self._lm
        assert self._unread is not None
        unread = [self._unread] * requests
        given = torch.zeros(2, requests, dtype=torch.int64, device=lm.device)
        table = StepTable.of(unread, lm.shapes, lm.window.tokens)
        plan = StepPlan((), given[1], (lm.window.tokens - 1,) * requests, lm.sliding, table)
        logits, replay = recorder.record(lambda: forward_plan(lm, given[0], plan))
        return StepGraph(given, plan, logits, replay, table.entries.to("cpu", copy=True))

    def _replayed(
        self, graph: StepGraph, tokens: Sequence[int], positions: Sequence[int], buffers: Sequence[KVBuffer]
    ) -> Tensor | None:
        """Compute a step by a recorded one; None if buffers lie as its kernels do not expect."""
        assert self._recorder is not None
        assert self._unread is not None
        assert graph.plan.table is not None
        empty = graph.given.shape[1] - len(tokens)
        places = torch.stack([self._places_of(buffer) for buffer in (*buffers, *[self._unread] * empty)], dim=1)
        if is_aligned(places, self._lm.shapes, self._lm.dtype) != graph.plan.table.aligned:
            return None
        given = torch.tensor([[*tokens, *[0] * empty], [*positions, *[0] * empty]])
        with self._turn, self._recorder.turn():
            graph.given.copy_(given)
            if not torch.equal(places, graph.places):
                graph.plan.table.entries.copy_(places)
                graph.places = places
            graph.replay()
            return graph.logits[: len(tokens)].clone()

    def _places_of(self, buffer: KVBuffer) -> Tensor:
        """Return where a buffer's layers are; looked up once for an answer."""
        if buffer not in self._places:
            self._places[buffer] = list_places([buffer])[:, 0]
        return self._places[buffer]

    @torch.inference_mode()
    def _errors(self, graph: StepGraph) -> list[float]:
        """Return how far a recorded step is from the one it stands for, over random keys and values.

        Once with a place left empty, where there are several, and with requests of different lengths.
        """
        lm, errors, places = self._lm, [], graph.given.shape[1]
        generator = torch.Generator(lm.device).manual_seed(0)
        for round_, last in enumerate(min(at, lm.window.tokens - 1) for at in TRIED_AT):
            positions = [max(0, last - 3 * place) for place in range(max(1, places - round_ % 2))]
            buffers = [KVBuffer.allocate(lm.shapes, last + 1, dtype=lm.dtype, device=lm.device) for _ in positions]
            for buffer in buffers:
                for held in (*buffer.keys, *buffer.values):
                    held.normal_(generator=generator)
            given = ([1 + place for place in range(len(positions))], positions, buffers)
            expected, found = forward_step(lm, *given), self._replayed(graph, *given)
            if found is None:
                raise RuntimeError("buffers are not aligned")
            errors.append(float((found - expected).norm() / expected.norm()))
        return errors


class CudaRecorder:
    """Records CUDA graphs, which all use one stream and one pool of memory: they take turns.

    Args:
        device: of CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record a graph, after calls that make libraries find their feet, which may not be part of it.

        Raises:
            RuntimeError: if the call waits for the device, which a graph cannot. That is found out before anything is
                recorded, since a recording that fails half way leaves torch's allocator in doubt.
        """
        with self.turn():
            compute()
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                compute()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.synchronize(self._device)
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    result = compute()
            finally:
                torch.cuda.set_stream(before)
        return result, graph.replay

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Compute on the recorder's stream, after what the caller's was given and before what it is given next."""
        with torch.cuda.device(self._device):
            callers = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(callers)
            with torch.cuda.stream(self._stream):
                yield
            callers.wait_stream(self._stream)
