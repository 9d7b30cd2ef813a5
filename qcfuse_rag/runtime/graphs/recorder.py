"""Record device work as CUDA graphs: launching kernels one by one takes longer than a fast GPU needs to run them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.kernels.support import kernels_available, unavailable_reason
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan

LOG = logging.getLogger(__name__)

STREAMS = 32
"""Streams that torch hands out in turn."""
REPLAYED = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Allowed relative error of a recording against the same kernels launched one by one, over all layers: 0, unless a
library multiplies by another algorithm while it is recorded."""


class GraphRecorder:
    """Records CUDA graphs that share one stream and one memory pool, so only one may run at a time.

    The recorder keeps all its graphs alive: a pool whose graphs are all gone accepts no more, and torch frees the
    workspace of matrix products, which all graphs of a stream share, as soon as one graph is freed (pytorch#193402).
    So no two recorders of a process share a stream, although torch hands out the same 32 in turn. Release earlier
    recorders before creating a new one: it frees their memory.
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


@dataclass(frozen=True, slots=True, eq=False)
class SamplePrompt:
    """A prompt of random tokens that the model has prefilled: over noise, real models multiply rounding errors.

    Attributes:
        ids: `[n]` int64 token ids.
        buffer: their keys and values.
    """

    ids: Tensor
    buffer: KVBuffer

    @classmethod
    @torch.inference_mode()
    def of(cls, lm: LanguageModel, length: int, seed: int = 0) -> SamplePrompt:
        """Prefill a prompt of some length."""
        vocabulary = lm.model.get_input_embeddings().num_embeddings
        ids = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).to(lm.device)
        buffer = lm.empty_buffer(length)
        forward_rows(lm, ids, RowsPlan.between(0, length, lm.device, lm.sliding), buffer)
        return cls(ids, buffer)

    def without(self, rows: Tensor, length: int) -> KVBuffer:
        """Return a copy of the keys and values of the first tokens, with NaN at rows, which are to be computed."""

        def copied(side: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(tensor[:, :, :length].contiguous().index_fill(2, rows, torch.nan) for tensor in side)

        return KVBuffer(copied(self.buffer.keys), copied(self.buffer.values))


def missing_kernels(lm: LanguageModel) -> str | None:
    """Return why nothing of a model can be recorded, or None if it can."""
    if lm.needs_torch_steps is not None:
        return lm.needs_torch_steps
    settings = (lm.device, lm.dtype, lm.widest_head)
    try:
        return None if kernels_available(*settings) else f"there are no kernels: {unavailable_reason(*settings)}"
    except torch.OutOfMemoryError:
        return "the kernels cannot be tried: the device is out of memory"


def recording_refusal(lm: LanguageModel, record: Callable[[], Sequence[float]]) -> str | None:
    """Return why what is recorded cannot be used, or None; `record` returns its errors against launched kernels."""
    try:
        errors = record()
    except Exception as error:  # a model may do anything that cannot be recorded; it runs without graphs
        return f"recording failed: {type(error).__name__}: {error}"
    LOG.info("largest error of a recording: %.2g (limit %.2g)", max(errors, default=0.0), REPLAYED[lm.dtype])
    off = [error for error in errors if not error <= REPLAYED[lm.dtype]]  # NaN fails, too
    return f"the recording differs from the original by {off[0]:.2g}" if off else None
