"""How an engine brings stored chunks to its requests, and what it keeps for that from one to the next."""

from __future__ import annotations

import threading

from qcfuse_rag.runtime.buffer_pool import SPARE_BYTES, BufferPool
from qcfuse_rag.runtime.kernels.support import kernels_run_on
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.host_to_device import HostToDevice, TransferLink

LIMIT_S = 30.0


class Loading:
    """Loads while computing, and waits no longer than it may.

    Args:
        lm: the model.
        limit_s: most seconds that a request waits for its store, in all; what has not come by then is computed. None
            waits as long as it takes.
        spare_bytes: most bytes of host memory to keep for the buffers of coming requests; 0 has torch allocate them.

    Attributes:
        pool: where buffers in host memory come from, if not from torch.

    Raises:
        ValueError: if no time is left to wait at all.
    """

    def __init__(self, lm: LanguageModel, limit_s: float | None = LIMIT_S, spare_bytes: int = SPARE_BYTES) -> None:
        if limit_s is not None and limit_s <= 0:
            raise ValueError(f"the most seconds to wait for a store must be positive or None, got {limit_s}")
        self.limit_s = limit_s
        self.pool = BufferPool(spare_bytes) if spare_bytes else None
        self._lm = lm
        self._link: TransferLink | None = None
        self._making = threading.Lock()

    def transfer(self) -> HostToDevice | None:
        """Return what takes a request's chunks to the model's device; None where placing does that itself."""
        lm = self._lm
        if not kernels_run_on(lm.device, lm.dtype, lm.widest_head):
            return None
        with self._making:
            self._link = self._link or TransferLink(lm.device)
        return HostToDevice(self._link)
