"""Measure on this machine what passes of a model cost; `loading.load_time` measures loading."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from qcfuse_rag.runtime.costs import Costs, costs_path, read_costs, save_costs
from qcfuse_rag.runtime.device import fastest_s, finish
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.host_to_device import TransferOpener
from qcfuse_rag.runtime.loading.load_time import LoadTimes, measure_loading
from qcfuse_rag.runtime.loading.wait_budget import call_with_timeout
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.backends.base import KVStore

SIZES = {"cpu": (16, 16, 128), "cuda": (16, 1024, 4096, 8192)}
"""Rows of the timed passes, by device: a small pass, which mostly launches kernels and reads weights, and passes that
show the cost of more rows and, on a GPU, of the keys that those rows see. On a GPU, rows behind as many keys as the
second size are timed too."""
PARTIAL_ROWS = 512
"""Rows that are timed on a GPU behind few keys and behind many."""
SAMPLES = 3
"""Timed passes of each size; the fastest counts, because other work disturbs it least."""
LAUNCH_BOUND = 1.25
"""A pass on a GPU that takes at most so many times as long as one of few rows may wait for the host."""


class MeasuredCosts:
    """The costs of a model over a store on this machine; call the object to get them.

    The first call measures them. A method with a guard makes it at the first prompt with a stored chunk; calling
    earlier, when the store holds passages, saves that prompt a second or two. The costs are kept in the store's folder,
    so they stay the same for all requests and after a restart on the same kind of machine. Safe to call from several
    threads.

    Args:
        lm: the model.
        store: the store.
        passes: runs the model's passes; once they are recorded, costs are measured again and kept in a separate file.
        transfers: opens the transfers by which requests load.

    Attributes:
        overhead_s: see `Costs`; 0 until `engine.first_passes` has measured it, which it does on a GPU: on a CPU passes
            take far longer. It is not kept in the file.
    """

    def __init__(
        self,
        lm: LanguageModel,
        store: KVStore,
        passes: PrefillRunner,
        transfers: TransferOpener,
    ) -> None:
        self._lm, self._store, self._passes, self._transfers = lm, store, passes, transfers
        self._costs: Costs | None = None
        self._recorded = False
        self.overhead_s = 0.0
        self._lock = threading.Lock()

    def __call__(self, limit_s: float | None = None) -> Costs:
        """Return the costs; loading costs 0 as long as the store holds nothing to measure it with.

        Args:
            limit_s: most seconds to wait for the store where loading is measured; None sets no limit.

        Raises:
            TimeoutError: if the store does not answer in time. Passes stay measured.
        """
        with self._lock:
            recorded = self._passes.refusal is None
            if recorded != self._recorded:
                self._costs, self._recorded = None, recorded
            if self._costs is None or not self._costs.load_s:
                path = costs_path(self._lm, self._store, recorded)
                self._costs = (path and read_costs(path)) or self._costs or measure_passes(self._lm, self._passes)
                if not self._costs.load_s:
                    measure = partial(measure_loading, self._lm, self._store, self._transfers)
                    times = call_with_timeout(limit_s, measure) or LoadTimes(0.0, 0.0)
                    overlaps = self._transfers.open() is not None
                    self._costs = replace(
                        self._costs, load_s=times.far_s, near_load_s=times.near_s, loading_overlaps=overlaps
                    )
                    if path is not None and self._costs.load_s:
                        save_costs(self._costs, path)
                        self._costs = read_costs(path) or self._costs  # another process may have saved its own first
            return replace(self._costs, overhead_s=self.overhead_s)


@torch.inference_mode()
def measure_passes(lm: LanguageModel, passes: PrefillRunner) -> Costs:
    """Time a few prefills.

    Args:
        lm: the model.
        passes: runs the model's passes; recorded ones are timed too.
    """
    sizes = [min(size, lm.context_window.tokens) for size in SIZES.get(lm.device.type, SIZES["cpu"])]
    prefill_once(lm, sizes[0])  # a process's first pass pays for one-time setup

    def seconds(size: int) -> float:
        return fastest_s(lm.device, partial(prefill_once, lm, size), SAMPLES)

    small, medium, *longer = sizes
    times_s = {small: seconds(small)}
    if len(longer) == 1:  # a CPU
        times_s |= {size: seconds(size) for size in {medium, *longer}}
        medium_s, large_s, more = times_s[medium], times_s[longer[0]], longer[0] - medium
        row_s = max(large_s - medium_s, 1e-9) / max(1, more)
        costs = Costs(max(0.0, times_s[small] - small * row_s), row_s)
    else:
        for size in longer:
            with suppress(torch.OutOfMemoryError):
                times_s[size] = seconds(size)
        row_s, attended_key_s = _row_costs(times_s)
        costs = Costs(times_s[small], row_s, launches_overlap=True, attended_key_s=attended_key_s)
    return _PartialPrefill(lm, passes).measure(costs, small, medium, sizes[-1])


def _row_costs(times_s: dict[int, float]) -> tuple[float, float]:
    """Return the seconds of a row and of each key that it attends to, from the times of whole prompts on a GPU.

    The first time is that of launching a pass. Prompts that take hardly longer tell nothing of rows.
    """
    (small, launch_s), *longer = sorted(times_s.items())
    by_device = [(size, time_s) for size, time_s in longer if time_s > LAUNCH_BOUND * launch_s]
    if not by_device:
        size, time_s = longer[-1] if longer else (small, launch_s)
        return max(0.0, time_s - launch_s) / size, 0.0
    (size, time_s), (longest, longest_s) = by_device[0], by_device[-1]
    row_s, attended_key_s = time_s / size, 0.0
    if longest > size:  # `b T + c T² / 2` through two lengths; a row takes at least half of what it takes in the first
        attended_key_s = min(max(0.0, 2 * (longest_s / longest - row_s) / (longest - size)), row_s / size)
    return row_s - attended_key_s * size / 2, attended_key_s


def prefill_once(lm: LanguageModel, tokens: int) -> None:
    """Compute a full prefill of arbitrary tokens."""
    plan = RowsPlan.between(0, tokens, lm.device, lm.sliding)
    buffer = lm.empty_buffer(tokens)
    forward_rows(lm, plan.rows % lm.model.get_input_embeddings().num_embeddings, plan, buffer)


@dataclass(frozen=True, slots=True)
class _PartialPrefill:
    """A pass over arbitrary tokens at the end of a prompt whose beginning is in the buffer already."""

    lm: LanguageModel
    passes: PrefillRunner

    def measure(self, costs: Costs, small: int, few: int, many: int) -> Costs:
        """Add what passes over some rows cost on a GPU, and recorded passes everywhere.

        Args:
            costs: those of whole prompts.
            small: a small number of rows.
            few: a number of keys to time more rows behind.
            many: a larger number of keys.
        """
        rows, replayed = min(PARTIAL_ROWS, few // 2), self.passes.replayed
        small_s = self.seconds(small, small + 1) if self.passes.refusal is None else 0.0
        if self.passes.replayed > replayed:  # otherwise other requests used the recorded passes all the time
            costs = _with_recorded(costs, small, small_s, costs.row_s)
        if not costs.launches_overlap:
            return costs
        replayed = self.passes.replayed
        try:
            few_s, many_s = self.seconds(rows, few), self.seconds(rows, many)
        except torch.OutOfMemoryError:
            return costs
        key_s = max(0.0, many_s - few_s) / rows / max(1, many - few)
        n_replayed = self.passes.replayed - replayed
        if n_replayed in (0, 2 * SAMPLES):
            costs = replace(costs, sparse_attended_key_s=key_s)
        if n_replayed == 2 * SAMPLES and costs.recorded_pass_s is not None:
            row_s = max(0.0, few_s - small_s - rows * key_s * (few - rows / 2)) / max(1, rows - small)
            costs = _with_recorded(costs, small, small_s, row_s)
        return costs

    def seconds(self, rows: int, length: int) -> float:
        """Return the seconds of the fastest sample."""
        lm, length = self.lm, min(length, self.lm.context_window.tokens)
        plan = RowsPlan.between(max(1, length - rows), length, lm.device, lm.sliding)
        ids = plan.rows % lm.model.get_input_embeddings().num_embeddings
        buffer = lm.empty_buffer(length)
        for tensor in (*buffer.keys, *buffer.values):
            tensor.zero_()
        finish(lm.device)
        return fastest_s(lm.device, partial(self.passes.forward_rows, ids, plan, buffer), SAMPLES)


def _with_recorded(costs: Costs, rows: int, pass_s: float, row_s: float) -> Costs:
    """Return costs with those of recorded passes, from the time of a pass over some rows and the cost of each row."""
    return replace(costs, recorded_pass_s=max(0.0, pass_s - rows * row_s), recorded_row_s=row_s)
