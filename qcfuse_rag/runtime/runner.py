"""A model and a store that are ready to run: passes, decode steps, buffers, transfers and costs in one object."""

from __future__ import annotations

import copy
import threading

from qcfuse_rag.runtime.buffer import SPARE_BYTES, BufferPool, KVBuffer
from qcfuse_rag.runtime.costs import MeasuredCosts
from qcfuse_rag.runtime.graphs.decode_graphs import DecodeRunner
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.host_to_device import HostToDevice, TransferLink
from qcfuse_rag.store.backends.base import KVStore

LOAD_LIMIT_S = 30.0


class ModelRunner:
    """Runs a model over prompts whose chunks a store keeps.

    Safe to use from several threads. On a GPU the kernels are compared with their references here, so that no request
    waits for that.

    Args:
        lm: the model.
        store: where chunks may be found.
        load_limit_s: most seconds that a request waits for the store, in all; chunks that have not come by then are
            computed. None waits as long as it takes.
        overlap: load the stored layers while passes compute; False loads all of them before the first pass.
        spare_bytes: most bytes of host memory to keep for the buffers of coming requests; 0 has torch allocate them.

    Attributes:
        prefills: computes rows of a prompt.
        decodes: computes the next token's row of one or several requests.
        costs: the measured costs of passes and loading, by which a method's guard decides.
        pool: where buffers in host memory come from, or None.

    Raises:
        ValueError: if `load_limit_s` is not positive.
    """

    def __init__(
        self,
        lm: LanguageModel,
        store: KVStore,
        *,
        load_limit_s: float | None = LOAD_LIMIT_S,
        overlap: bool = True,
        spare_bytes: int = SPARE_BYTES,
    ) -> None:
        if load_limit_s is not None and load_limit_s <= 0:
            raise ValueError(f"the most seconds to wait for a store must be positive or None, got {load_limit_s}")
        self.lm, self.store = lm, store
        self.load_limit_s, self.overlap = load_limit_s, overlap
        self.prefills = PrefillRunner(lm)
        self.decodes = DecodeRunner(lm)
        self.costs = MeasuredCosts(lm, store, self.prefills)
        self.pool = BufferPool(spare_bytes) if spare_bytes else None
        self._link: TransferLink | None = None
        self._opening_link = threading.Lock()
        self._runs_kernels()

    def with_store(self, store: KVStore) -> ModelRunner:
        """Return a runner of the same model, sharing all that was recorded and kept, over another store."""
        other = copy.copy(self)
        other.store, other.costs = store, MeasuredCosts(self.lm, store, self.prefills)
        return other

    def allocate(self, capacity: int) -> KVBuffer:
        """Reserve the buffer of a request.

        Args:
            capacity: tokens of the prompt and its answer.
        """
        lm = self.lm
        return KVBuffer.allocate(lm.shapes, capacity, dtype=lm.dtype, device=lm.device, pool=self.pool)

    def open_transfer(self) -> HostToDevice | None:
        """Return what copies one request's chunks to the model's device; None where placement copies them itself."""
        if not self._runs_kernels():
            return None
        with self._opening_link:
            self._link = self._link or TransferLink(self.lm.device)
        return HostToDevice(self._link)

    def compile(self) -> None:
        """Record passes and decode steps as CUDA graphs where there is a GPU; takes memory and seconds.

        Not while the model is used otherwise: what other threads do on the device can end a recording.
        """
        self.prefills.compile()
        self.decodes.compile()

    def _runs_kernels(self) -> bool:
        return kernels_available(self.lm.device, self.lm.dtype, self.lm.widest_head)
