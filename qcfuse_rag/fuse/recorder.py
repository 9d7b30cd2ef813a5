"""Recording what a device computes: launching kernels one by one takes longer than a fast GPU needs to run them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from qcfuse_rag.fuse.kernels.support import kernel_refusal, kernels_run_on, widest_head

if TYPE_CHECKING:
    from qcfuse_rag.model.language_model import LanguageModel

TOLERANCE = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Relative error of a whole model's logits: keys shared out otherwise are added up in another order, and every layer
adds to that. A recording that kept what it should have read is off by about 1."""

LOG = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records what a call computes on a device."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return a call's result, and what computes that again, into the same tensor."""

    def turn(self) -> AbstractContextManager[object]:
        """Have what a thread does meanwhile come after what others did in their turns."""


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
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                callers.wait_stream(self._stream)


def recording_refusal(lm: LanguageModel, what: str, record: Callable[[], Sequence[float]]) -> str | None:
    """Record something of a model; return why what came of it is not to be used, or None if it is.

    Args:
        lm: the model.
        what: is recorded, for the log.
        record: records, and returns relative errors of what was recorded.
    """
    about = (lm.device, lm.dtype, widest_head(lm))
    if not kernels_run_on(*about):
        return f"there are no kernels: {kernel_refusal(*about)}"
    try:
        off = float(torch.tensor(record()).max())  # NaN if any is
    except Exception as error:  # whatever a model does that cannot be recorded; it runs without
        refusal = f"they cannot be recorded: {type(error).__name__}: {error}"
    else:
        if off <= TOLERANCE[lm.dtype]:
            return None
        refusal = f"recorded {what} are off by {off:.2g}"
    LOG.warning("%s are launched kernel by kernel: %s", what, refusal)
    return refusal
