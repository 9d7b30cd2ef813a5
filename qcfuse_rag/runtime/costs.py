"""Predict the time of a prefill from costs that are measured on this machine and kept in a file.

`Costs` predicts, `MeasuredCosts` returns the costs of a model over a store. Below them are the measurement of passes
and the file; loading is measured in `runtime.loading.load_time`.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.models.cpu_dtype import processor_name
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.attention.dense import dense_attention_name
from qcfuse_rag.runtime.device import fastest_s, finish
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.host_to_device import TransferOpener
from qcfuse_rag.runtime.loading.load_time import LoadTimes, measure_loading
from qcfuse_rag.runtime.loading.wait_budget import call_with_timeout
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.regular_file import read_text

SIZES = {"cpu": (16, 16, 128), "cuda": (16, 1024, 4096, 8192)}
"""Rows of the timed passes, by device: a small pass, which mostly launches kernels and reads weights; passes whose
differences are the cost of more rows and, on a GPU, of the keys that those rows see. On a GPU some hundred rows take as
long as a few, hence the larger sizes."""
ATTENTION_ROWS = 512
"""Rows that are timed on a GPU behind few keys and behind many."""
SAMPLES = 2
"""Timed passes of each size; the fastest counts, because other work disturbs it least."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds that predict a prefill.

    A pass over a whole prompt of `T` tokens takes `pass_s + T row_s + T² / 2 attended_key_s`. A pass over `R` of its
    rows takes `recorded_pass_s + R row_s + R K sparse_attended_key_s`, where a row sees `K` keys; without recordings it
    begins with `pass_s`.

    Attributes:
        pass_s: the fixed cost of a pass.
        row_s: the cost of each row.
        load_s: the cost of loading a token from the store, by the path that requests take.
        near_load_s: the same of a token that the nearest tier has; None if it is `load_s`.
        recorded_pass_s: the fixed cost of a pass over some rows of a prompt if such passes are recorded as CUDA
            graphs; else None.
        attended_key_s: the cost of each key that a row of a whole prompt attends to. It is measured on GPUs only: on a
            CPU a pass that is long enough takes many seconds. There full prefill of a long prompt takes longer than
            predicted.
        sparse_attended_key_s: the same of a pass over some rows of a prompt.
        loading_overlaps: whether loading takes no time from passes. On a GPU a link copies while the device computes.
            On a CPU the thread that computes also places the loaded keys and values.
        overhead_s: the fixed cost of a fused prefill besides its passes: lookups, starting to load, scoring.
    """

    pass_s: float
    row_s: float
    load_s: float = 0.0
    near_load_s: float | None = None
    recorded_pass_s: float | None = None
    attended_key_s: float = 0.0
    sparse_attended_key_s: float = 0.0
    loading_overlaps: bool = False
    overhead_s: float = 0.0

    def full_pass_s(self, rows: int, held: int = 0) -> float:
        """Predict the seconds of a pass over a whole prompt that follows `held` tokens with cached keys and values."""
        return self.pass_s + rows * (self.row_s + (held + rows / 2) * self.attended_key_s) if rows else 0.0

    def partial_pass_s(self, rows: int, keys: float = 0, share: float = 1.0) -> float:
        """Predict the seconds of a pass over some rows of a prompt.

        Args:
            rows: their number.
            keys: the keys that each row sees.
            share: share of the layers that the pass runs through.
        """
        pass_s = self.pass_s if self.recorded_pass_s is None else self.recorded_pass_s
        return share * (pass_s + rows * (self.row_s + keys * self.sparse_attended_key_s)) if rows else 0.0

    def fused_s(
        self,
        *,
        prompt_tokens: int,
        held_tokens: int,
        stored_tokens: int,
        near_tokens: int,
        probe_rows: int,
        probe_share: float,
        rows: int,
    ) -> float:
        """Predict the seconds of a fused prefill.

        Args:
            prompt_tokens: tokens of the prompt. The probe's rows see them all, and recomputed rows, which are spread
                over the prompt, half of them.
            held_tokens: tokens before them, whose keys and values an earlier request computed; all rows see them.
            stored_tokens: tokens to load.
            near_tokens: tokens to load that the nearest tier has. The others are copied there first.
            probe_rows: rows that a probe computes before rows are chosen; 0 without a probe.
            probe_share: share of the layers that it runs.
            rows: rows to recompute.
        """
        near_load_s = self.load_s if self.near_load_s is None else self.near_load_s
        before_s = self.overhead_s + (stored_tokens - near_tokens) * (self.load_s - near_load_s)
        load_s = stored_tokens * near_load_s
        probe_s = self.partial_pass_s(probe_rows, held_tokens + prompt_tokens, probe_share)
        rows_s = self.partial_pass_s(rows, held_tokens + prompt_tokens / 2)
        if not self.loading_overlaps:
            return before_s + load_s + probe_s + rows_s
        return before_s + (max(load_s, probe_s) + rows_s if probe_rows else max(load_s, rows_s))


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
    small, medium, large, longest = (*sizes, sizes[-1])[:4]
    prefill_once(lm, small)  # a process's first pass pays for one-time setup

    def seconds(size: int) -> float:
        return fastest_s(lm.device, partial(prefill_once, lm, size), SAMPLES)

    small_s, medium_s = seconds(small), seconds(medium)
    large_s = seconds(large) if large > medium else medium_s
    row_s = max(large_s - medium_s, 1e-9) / max(1, large - medium)
    attended_key_s = sparse_attended_key_s = 0.0
    if longest >= 1.5 * large > large > medium:
        with suppress(torch.OutOfMemoryError):
            # `a + b T + c T²` through three sizes; the limit keeps `b`, the time of a row, positive.
            curvature = (max(seconds(longest) - large_s, 0.0) / (longest - large) - row_s) / (longest - medium)
            attended_key_s = min(max(0.0, 2 * curvature), row_s / large)
            row_s -= attended_key_s / 2 * (large + medium)
    recorded_pass_s = None
    run, replayed = _PartialPrefill(lm, passes), passes.replayed
    partial_s = run.seconds(small, small + 1) if passes.refusal is None else 0.0
    if passes.replayed > replayed:  # otherwise other requests used the recorded passes all the time
        recorded_pass_s = max(0.0, partial_s - small * row_s)
    if attended_key_s:
        sparse_attended_key_s = run.attended_key_s(medium, longest)
    pass_s = max(0.0, small_s - small * row_s)
    return Costs(
        pass_s,
        row_s,
        recorded_pass_s=recorded_pass_s,
        attended_key_s=attended_key_s,
        sparse_attended_key_s=sparse_attended_key_s,
    )


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

    def attended_key_s(self, few: int, many: int) -> float:
        """Return the seconds of each key that a row attends to, from passes behind few keys and behind many.

        It is 0 if the device has no memory for many keys, or if another request used the recorded passes meanwhile.
        """
        replayed = self.passes.replayed
        try:
            more_s = self.seconds(ATTENTION_ROWS, many) - self.seconds(ATTENTION_ROWS, few)
        except torch.OutOfMemoryError:
            return 0.0
        if self.passes.replayed - replayed not in (0, 2 * SAMPLES):
            return 0.0
        return max(0.0, more_s) / ATTENTION_ROWS / (many - few)


def costs_path(lm: LanguageModel, store: KVStore, recorded: bool = False) -> Path | None:
    """Return the file of a model's costs on this machine; deleting it makes the next process measure again.

    Args:
        lm: the model.
        store: the store; its tiers and its format count.
        recorded: whether passes are recorded.

    Returns:
        A path in the store's folder; None if the store has no folder.
    """
    if store.folder is None:
        return None
    device = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else processor_name()
    kernels = kernels_available(lm.device, lm.dtype, lm.widest_head)
    facts = (
        lm.fingerprint.digest,
        lm.device.type,
        device,
        os.cpu_count(),
        torch.get_num_threads(),
        torch.__version__,
        dense_attention_name(lm.device, lm.dtype),
        kernels,
        recorded,
        store.numbers,
        *(tier.kind for tier in store.tiers),
    )
    return store.folder / f"costs-{digest(' '.join(map(str, facts)).encode())}.json"


def read_costs(path: Path) -> Costs | None:
    """Read a file of `save_costs`; None if it does not exist, is damaged, or lacks a cost."""
    try:
        data = json.loads(read_text(path))
        recorded_pass_s = data.get("recorded_pass_s")
        names = ("pass_s", "row_s", "load_s", "near_load_s", "attended_key_s", "sparse_attended_key_s")
        numbers = {name: float(data[name]) for name in names}
        recorded_pass_s = None if recorded_pass_s is None else float(recorded_pass_s)
        return Costs(**numbers, recorded_pass_s=recorded_pass_s, loading_overlaps=bool(data["loading_overlaps"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def save_costs(costs: Costs, path: Path) -> None:
    """Save costs for later processes, unless a valid file exists. A folder that is not writable is left alone."""
    if read_costs(path) is not None:
        return
    with suppress(OSError):
        write_atomically(path, json.dumps(asdict(replace(costs, overhead_s=0.0))))
