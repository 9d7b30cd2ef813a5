"""Recording what a device computes: launching kernels one by one takes longer than a fast GPU needs to run them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from qcfuse_rag.runtime.kernels.limits import relative_error
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.kernels.support import unavailable_reason

if TYPE_CHECKING:
    from qcfuse_rag.runtime.language_model import LanguageModel

STRICT = 1e-2
"""Relative error of what is recorded, from the same computed again kernel by kernel."""
LOOSE = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""The same, from what is computed without any table and by the model's own modules: keys shared out otherwise are added
up in another order, `runtime.fused_layers.fused_modules` rounds less often, and every layer of a model adds to that."""


class Recorder(Protocol):
    """Records what a call computes on a device.

    Attributes:
        broken: why nothing more is to be recorded, by this recorder or another, or None.
    """

    broken: str | None

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return a call's result, and what computes that again, into the same tensor."""

    def turn(self) -> AbstractContextManager[object]:
        """Have what a thread does meanwhile come after what others did in their turns."""


class CudaRecorder:
    """Records CUDA graphs, which all use one stream and one pool of memory: they take turns.

    None of them is let go of before the recorder: a pool whose graphs are all gone takes no more, and torch frees the
    workspace of matrix products that all graphs of a stream share as soon as one of them goes (pytorch#193402). A new
    recorder is made with earlier ones out of use: it frees what they leave.

    Args:
        device: of CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.broken: str | None = None
        gc.collect()
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # which is not possible while something is being recorded
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record a graph, after calls that make libraries find their feet, which may not be part of it.

        Raises:
            RuntimeError: if the call waits for the device, which a graph cannot. That is found out before anything is
                recorded, since a recording that fails half way leaves torch's allocator in doubt; after one that does
                nothing more is recorded.
        """
        if self.broken is not None:
            raise RuntimeError(f"an earlier recording ended half way: {self.broken}")
        with self.turn():
            compute()
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                compute()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.synchronize(self._device)
        # Not by `torch.cuda.graph`, which empties the allocator's cache each time: there are hundreds of small graphs.
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream), _without_garbage_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = compute()
                finally:
                    graph.capture_end()
        except Exception as error:
            self.broken = str(error)
            raise
        return result, graph.replay

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Compute on the recorder's stream, after what the caller's was given and before what it is given next."""
        with torch.cuda.device(self._device):
            callers = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(callers)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                callers.wait_stream(self._stream)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect no garbage: what is collected may be another graph, and to free one ends a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """How far something recorded is from what it stands for, and how far it may be: relative errors."""

    error: float
    allowed: float

    @classmethod
    def of(cls, found: Tensor, expected: Tensor, allowed: float) -> ErrorBound:
        """Compare two tensors."""
        return cls(relative_error(found, expected), allowed)


def missing_kernels(lm: LanguageModel) -> str | None:
    """Return why nothing of a model can be recorded that kernels are part of, or None if there are kernels."""
    about = (lm.device, lm.dtype, lm.widest_head)
    try:
        return None if kernels_available(*about) else f"there are no kernels: {unavailable_reason(*about)}"
    except torch.OutOfMemoryError:
        return "there are no kernels: there is no room to try them"


def recording_refusal(record: Callable[[], Sequence[ErrorBound]]) -> str | None:
    """Record something, and compare it; return why what came of it is not to be used, or None if it is."""
    try:
        off = [one.error for one in record() if not one.error <= one.allowed]  # NaN is not
    except Exception as error:  # whatever a model does that cannot be recorded; it runs without
        return f"they cannot be recorded: {type(error).__name__}: {error}"
    return f"recorded ones are off by {off[0]:.2g}" if off else None


def record_stream(result: Tensor) -> Tensor:
    """Return what was computed in a turn, after telling torch's allocator that the caller's stream will use it."""
    if result.is_cuda:
        result.record_stream(torch.cuda.current_stream(result.device))
    return result
