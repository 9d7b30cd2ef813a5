"""Record device work as CUDA graphs: launching kernels one by one takes longer than a fast GPU needs to run them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from qcfuse_rag.runtime.kernels.limits import relative_error
from qcfuse_rag.runtime.kernels.support import kernels_available, unavailable_reason

if TYPE_CHECKING:
    from qcfuse_rag.runtime.language_model import LanguageModel

LOG = logging.getLogger(__name__)

STREAMS = 32
"""Streams that torch hands out in turn."""
REPLAYED = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Allowed relative error of a recording against the same kernels launched one by one, over all layers: 0, unless a
library multiplies by another algorithm while it is recorded."""


class Recorder(Protocol):
    """Records the device work of a call.

    Attributes:
        broken: why neither this recorder nor another may record anything more, or None.
    """

    broken: str | None

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return the result of a call, and a function that computes it again into the same tensor."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Order the device work of this thread after earlier work in such a block, of any thread."""


class GraphRecorder:
    """Records CUDA graphs that share one stream and one memory pool, so only one may run at a time.

    The recorder keeps all its graphs alive: a pool whose graphs are all gone accepts no more, and torch frees the
    workspace of matrix products, which all graphs of a stream share, as soon as one graph is freed (pytorch#193402).
    So no two recorders of a process share a stream, although torch hands out the same 32 in turn. Release earlier
    recorders before creating a new one: it frees their memory.

    Args:
        device: a CUDA device.
    """

    _recorders: ClassVar[WeakSet[GraphRecorder]] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.broken: str | None = None
        gc.collect()
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # not possible while a graph is recorded
            self._stream = self._unused_stream()
            self._recorders.add(self)
            self._pool = torch.cuda.graph_pool_handle()

    def _unused_stream(self) -> torch.cuda.Stream:
        used = {recorder._stream.cuda_stream for recorder in self._recorders if recorder._device == self._device}
        for _ in range(STREAMS):
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if stream.cuda_stream not in used:
                return stream
        raise RuntimeError(f"all {STREAMS} streams of {self._device} are used by recorded graphs of other engines")

    @torch.inference_mode()
    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record a graph, after two calls in which libraries initialise, which must not be part of it.

        Raises:
            RuntimeError: if the call waits for the device, which a graph cannot do. The second call checks this first,
                because a recording that fails half way leaves torch's allocator in an unknown state; after such a
                failure nothing more is recorded.
        """
        if self.broken is not None:
            raise RuntimeError(f"an earlier recording ended half way: {self.broken}")
        with self.exclusive():
            compute()
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                compute()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.synchronize(self._device)
        # `torch.cuda.graph` would empty the allocator's cache for each of the hundreds of small graphs.
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
    def exclusive(self) -> Iterator[None]:
        """Run on the recorder's stream, after earlier and before later work of the caller's stream."""
        with torch.cuda.device(self._device):
            caller_stream = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(caller_stream)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                caller_stream.wait_stream(self._stream)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: freeing another graph would end the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """The relative error of a recording against its original, and the allowed error."""

    error: float
    allowed: float

    @classmethod
    def of(cls, result: Tensor, expected: Tensor, allowed: float) -> ErrorBound:
        """Compare two tensors."""
        return cls(relative_error(result, expected), allowed)


def missing_kernels(lm: LanguageModel) -> str | None:
    """Return why a model has no kernels to record, or None if it has."""
    settings = (lm.device, lm.dtype, lm.widest_head)
    try:
        return None if kernels_available(*settings) else f"there are no kernels: {unavailable_reason(*settings)}"
    except torch.OutOfMemoryError:
        return "the kernels cannot be tried: the device is out of memory"


def recording_refusal(record: Callable[[], Sequence[ErrorBound]]) -> str | None:
    """Record and check something; return why the recording cannot be used, or None if it can."""
    try:
        bounds = record()
        off = [bound.error for bound in bounds if not bound.error <= bound.allowed]  # NaN fails, too
        if bounds and not off:
            worst = max(bounds, key=lambda bound: bound.error / bound.allowed)
            LOG.info("largest error of a recording: %.2g (limit %.2g)", worst.error, worst.allowed)
    except Exception as error:  # a model may do anything that cannot be recorded; it runs without graphs
        return f"recording failed: {type(error).__name__}: {error}"
    return f"the recording differs from the original by {off[0]:.2g}" if off else None
