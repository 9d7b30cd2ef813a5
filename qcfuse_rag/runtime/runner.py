"""Run a model over prompts from a store: passes, decode steps, buffers, transfers and costs in one object."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch

from qcfuse_rag.runtime.buffer import BufferPool, KVBuffer
from qcfuse_rag.runtime.graphs.runners import DecodeRunner, PrefillRunner
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.learned_costs import LearnedCosts
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.backends.memory import MemoryStore

LOG = logging.getLogger(__name__)


class ModelRunner:
    """Runs a model over prompts whose chunks are in a store.

    Safe to use from several threads. On a GPU, the constructor compares the kernels with their references, so that no
    request waits for that.

    Args:
        lm: the model.
        store: the store of the chunks.
        load_limit_s: most seconds that a request waits for the store in total; chunks that have not arrived by then
            are computed. None sets no limit.
        overlap: load the stored layers while passes compute; False loads all of them before the first pass.

    Attributes:
        prefills: computes rows of a prompt.
        decodes: computes the next token's row of one or several requests.
        costs: the learned costs of passes and loading, which a method's guard uses.
        pool: provides buffers in host memory.
        free_memory: called if a device has no memory for a request's buffer, which is then allocated again; None if
            nothing can be freed.

    Raises:
        ValueError: if `load_limit_s` is not positive.
    """

    def __init__(
        self, lm: LanguageModel, store: KVStore, *, load_limit_s: float | None = None, overlap: bool = True
    ) -> None:
        if load_limit_s is not None and load_limit_s <= 0:
            raise ValueError(f"the most seconds to wait for a store must be positive or None, got {load_limit_s}")
        self.lm, self.store = lm, store
        _page_lock(lm, store)
        self.load_limit_s, self.overlap = load_limit_s, overlap
        self.prefills = PrefillRunner(lm)
        self.decodes = DecodeRunner(lm)
        self.costs = LearnedCosts(lm, store, self.prefills)
        self.pool: BufferPool | None = BufferPool()
        self.free_memory: Callable[[], None] | None = None
        kernels_available(lm.device, lm.dtype, lm.widest_head)

    def with_store(self, store: KVStore) -> ModelRunner:
        """Return a runner of the same model over another store; recorded passes and pool are shared."""
        _page_lock(self.lm, store)
        runner = copy.copy(self)
        runner.store, runner.costs = store, LearnedCosts(self.lm, store, self.prefills)
        runner.costs.recorded_pass_s = self.costs.recorded_pass_s
        return runner

    def allocate(self, capacity: int) -> KVBuffer:
        """Allocate the buffer of a request with so many tokens in prompt and answer.

        Raises:
            torch.OutOfMemoryError: if the device has no memory for it.
        """
        lm = self.lm
        try:
            return lm.empty_buffer(capacity, pool=self.pool)
        except torch.OutOfMemoryError:
            if self.free_memory is None:
                raise
        LOG.warning("no memory for %d tokens on %s: cached prefixes are dropped", capacity, lm.device)
        self.free_memory()
        return lm.empty_buffer(capacity, pool=self.pool)

    def compile(self) -> None:
        """Record passes and decode steps as CUDA graphs if there is a GPU; this takes memory and seconds.

        Do not use the model meanwhile: work of other threads on the device can end a recording.
        """
        self.prefills.compile()
        self.decodes.compile()


def _page_lock(lm: LanguageModel, store: KVStore) -> None:
    """Have a store keep new entries where the model's GPU reads them fastest."""
    if lm.device.type == "cuda":
        for tier in store.tiers:
            if isinstance(tier, MemoryStore):
                tier.page_lock()
