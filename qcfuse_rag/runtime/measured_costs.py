"""Measure on this machine what passes of a model cost; `loading.load_time` measures loading."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from qcfuse_rag.runtime.costs import TIMED_ROWS, Costs, costs_path, read_costs, save_costs
from qcfuse_rag.runtime.device import fastest_s, finish
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.host_to_device import TransferOpener
from qcfuse_rag.runtime.loading.load_time import LoadTimes, measure_loading
from qcfuse_rag.runtime.loading.wait_budget import call_with_timeout
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.backends.base import KVStore

FEW_ROWS = 16
"""Rows of the shortest timed pass: on a CPU it mostly reads weights, on a GPU it takes as long as launching it."""
CPU_ROWS = 128
"""Rows of the longer timed pass on a CPU."""
GPU_ROWS = (4096, 8192)
"""Rows of the longer timed passes on a GPU; two, because the keys that rows see cost time as well."""
GPU_KEYS = (1024, 8192)
"""Keys behind which some rows are timed on a GPU."""
APART = 1.5
"""Sizes that differ by less show no difference but noise."""
SAMPLES = 3
"""Timed passes of each size; the fastest counts, because other work disturbs it least."""
LAUNCH_BOUND = 1.05
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
    prefill_once(lm, min(FEW_ROWS, lm.context_window.tokens))  # a process's first pass pays for one-time setup
    costs = _gpu_costs(lm) if launches_overlap(lm) else _cpu_costs(lm)
    return PartialPrefill(lm, passes).measure(costs)


def launches_overlap(lm: LanguageModel) -> bool:
    """Return whether the host launches a pass while the device computes it."""
    return lm.device.type == "cuda"


def _seconds(lm: LanguageModel, size: int, samples: int = SAMPLES) -> float:
    return fastest_s(lm.device, partial(prefill_once, lm, size), samples)


def _cpu_costs(lm: LanguageModel) -> Costs:
    few, many = (min(size, lm.context_window.tokens) for size in (FEW_ROWS, CPU_ROWS))
    few_s = _seconds(lm, few)
    row_s = max(_seconds(lm, many) - few_s, 1e-9) / max(1, many - few)
    return Costs(max(0.0, few_s - few * row_s), row_s)


def _gpu_costs(lm: LanguageModel) -> Costs:
    few, *longer = (min(size, lm.context_window.tokens) for size in (FEW_ROWS, *GPU_ROWS))
    launch_s, times_s = _seconds(lm, few, 2 * SAMPLES), dict[int, float]()
    for size in longer:
        with suppress(torch.OutOfMemoryError):
            times_s[size] = _seconds(lm, size)
    row_s, attended_key_s = _row_costs(launch_s, times_s)
    return Costs(
        launch_s,
        row_s,
        launches_overlap=True,
        attended_key_s=attended_key_s,
        sparse_attended_key_s=attended_key_s,
    )


def _row_costs(launch_s: float, times_s: dict[int, float]) -> tuple[float, float]:
    """Return the seconds of a row and of each key that it attends to on a GPU.

    Args:
        launch_s: seconds of launching a pass.
        times_s: seconds of whole prompts, by their tokens. Those that take hardly longer than launching tell nothing.
    """
    by_device = sorted((size, time_s) for size, time_s in times_s.items() if time_s > LAUNCH_BOUND * launch_s)
    if not by_device:
        size = max(times_s, default=1)
        return max(0.0, times_s.get(size, launch_s) - launch_s) / size, 0.0
    (size, time_s), (longest, longest_s) = by_device[0], by_device[-1]
    row_s, attended_key_s = time_s / size, 0.0
    if longest >= APART * size:  # `b T + c T² / 2` through two lengths; the keys take at most half of the shorter time
        attended_key_s = min(max(0.0, 2 * (longest_s / longest - row_s) / (longest - size)), row_s / size)
    return row_s - attended_key_s * size / 2, attended_key_s


def prefill_once(lm: LanguageModel, tokens: int) -> None:
    """Compute a full prefill of arbitrary tokens."""
    plan = RowsPlan.between(0, tokens, lm.device, lm.sliding)
    buffer = lm.empty_buffer(tokens)
    forward_rows(lm, plan.rows % lm.model.get_input_embeddings().num_embeddings, plan, buffer)


@dataclass(frozen=True, slots=True)
class PartialPrefill:
    """A pass over arbitrary tokens at the end of a prompt whose beginning is in the buffer already."""

    lm: LanguageModel
    passes: PrefillRunner

    def measure(self, costs: Costs) -> Costs:
        """Add what recorded passes cost, if there are any and no other request uses them meanwhile."""
        few, most = FEW_ROWS, self.passes.most_rows
        if most < few:
            return costs
        few_s, n_replayed = self._replayed_seconds(few, few + 1)
        if not n_replayed:
            return costs
        costs = replace(costs, recorded_rows=most, **_recorded(few, few_s, costs.row_s))
        near, far = (min(size, self.lm.context_window.tokens) for size in GPU_KEYS)
        rows = min(TIMED_ROWS, most, near // 2)
        if not costs.launches_overlap or rows < APART * few or far < APART * near:
            return costs
        try:
            (near_s, near_replayed), (far_s, far_replayed) = (
                self._replayed_seconds(rows, keys) for keys in (near, far)
            )
        except torch.OutOfMemoryError:
            return costs
        if (near_replayed, far_replayed) != (SAMPLES, SAMPLES):
            return costs
        key_s = max(0.0, far_s - near_s) / rows / (far - near)
        row_s = max(0.0, near_s - few_s - rows * key_s * (near - rows / 2)) / (rows - few)
        return replace(costs, sparse_attended_key_s=key_s, **_recorded(few, few_s, row_s))

    def _replayed_seconds(self, rows: int, length: int) -> tuple[float, int]:
        """Return the seconds of the fastest sample, and how many recorded passes ran meanwhile."""
        before = self.passes.replayed
        return self.seconds(rows, length), self.passes.replayed - before

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


def _recorded(rows: int, pass_s: float, row_s: float) -> dict[str, Any]:
    """Return the costs of recorded passes, from the time of a pass over some rows and the cost of each row."""
    return {"recorded_pass_s": max(0.0, pass_s - rows * row_s), "recorded_row_s": row_s}
