"""Predict the time of a prefill from costs that are measured on this machine and kept in a file.

`Costs` predicts, `MeasuredCosts` returns the costs of a model over a store. Below them are the two measurements, of
passes and of loading, and the file.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import torch

from qcfuse_rag.errors import CorruptEntry, QCFuseError
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.placement import copy_chunk
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.atomic_write import write_atomically
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.backends.index_database import INDEX_FAILURES
from qcfuse_rag.store.prefill_base import BASES, BLIND
from qcfuse_rag.store.regular_file import read_text

SIZES = {"cpu": (16, 16, 128), "cuda": (16, 1024, 4096)}
"""Rows of the timed passes, by device: a small pass, which mostly launches kernels and reads weights, and two passes
whose difference is the cost of more rows. On a GPU some hundred rows take as long as a few, hence the larger sizes."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds that predict a prefill: a pass over `R` rows takes `pass_s + R row_s`.

    Attention over long prompts is not modelled. It makes full prefill, which has many rows, slower than predicted.

    Attributes:
        pass_s: the fixed cost of a pass.
        row_s: the cost of each row.
        load_s: the cost of loading a token from the store.
        recorded_pass_s: the fixed cost of a pass over some rows of a prompt if such passes are recorded as CUDA
            graphs; else None.
    """

    pass_s: float
    row_s: float
    load_s: float = 0.0
    recorded_pass_s: float | None = None

    def full_pass_s(self, rows: int) -> float:
        """Predict the seconds of a pass over a whole prompt."""
        return self.pass_s + rows * self.row_s if rows else 0.0

    def partial_pass_s(self, rows: int, share: float = 1.0) -> float:
        """Predict the seconds of a pass over some rows of a prompt, through a share of the layers."""
        pass_s = self.pass_s if self.recorded_pass_s is None else self.recorded_pass_s
        return share * (pass_s + rows * self.row_s) if rows else 0.0

    def loading_s(self, tokens: int) -> float:
        """Predict the seconds of loading some tokens."""
        return tokens * self.load_s


class MeasuredCosts:
    """The costs of a model over a store on this machine; call the object to get them.

    The first call measures them. A method with a guard makes it at the first prompt with a stored chunk; calling
    earlier, when the store holds passages, saves that prompt a second or two. The costs are kept in the store's folder,
    so they stay the same for all requests and after a restart on the same kind of machine, and no answer depends on
    earlier requests. Safe to call from several threads.

    Args:
        lm: the model.
        store: the store.
        passes: runs the model's passes; once they are recorded, costs are measured again and kept in a separate file.
    """

    def __init__(self, lm: LanguageModel, store: KVStore, passes: PrefillRunner | None = None) -> None:
        self._lm, self._store = lm, store
        self._passes = passes or PrefillRunner(lm)
        self._costs: Costs | None = None
        self._recorded = False
        self._lock = threading.Lock()

    def __call__(self) -> Costs:
        """Return the costs; loading costs 0 as long as the store holds nothing to measure it with."""
        with self._lock:
            recorded = self._passes.refusal is None
            if recorded != self._recorded:
                self._costs, self._recorded = None, recorded
            if self._costs is None or not self._costs.load_s:
                path = None if self._store.folder is None else costs_path(self._store.folder, self._lm, recorded)
                self._costs = (path and read_costs(path)) or self._costs or measure_passes(self._lm, self._passes)
                if not self._costs.load_s:
                    self._costs = replace(self._costs, load_s=measure_loading(self._lm, self._store) or 0.0)
                    if path is not None and self._costs.load_s:
                        save_costs(self._costs, path)
                        self._costs = read_costs(path) or self._costs  # another process may have saved its own first
            return self._costs


@torch.inference_mode()
def measure_passes(lm: LanguageModel, passes: PrefillRunner | None = None, *, samples: int = 2) -> Costs:
    """Time a few prefills. The fastest sample of each size counts, since other work disturbs it least.

    Args:
        lm: the model.
        passes: runs the model's passes; recorded ones are timed too.
        samples: number of samples of each size.
    """
    small, medium, large = (min(size, lm.window.tokens) for size in SIZES.get(lm.device.type, SIZES["cpu"]))
    prefill_once(lm, small)  # a process's first pass pays for one-time setup
    seconds = {
        size: min(timed(lm, partial(prefill_once, lm, size)) for _ in range(samples))
        for size in sorted({small, medium, large})
    }
    row_s = max(seconds[large] - seconds[medium], 1e-9) / max(1, large - medium)
    recorded_pass_s = None
    if passes is not None and passes.refusal is None:
        replayed = passes.replayed
        partial_s = min(timed(lm, partial(_partial_prefill_once, lm, passes, small)) for _ in range(samples + 1))
        if passes.replayed > replayed:  # otherwise other requests used the recorded passes all the time
            recorded_pass_s = max(0.0, partial_s - small * row_s)
    return Costs(max(0.0, seconds[small] - small * row_s), row_s, recorded_pass_s=recorded_pass_s)


def prefill_once(lm: LanguageModel, tokens: int) -> None:
    """Compute a full prefill of arbitrary tokens."""
    plan = RowsPlan.between(0, tokens, lm.device, lm.sliding)
    buffer = KVBuffer.allocate(lm.shapes, tokens, dtype=lm.dtype, device=lm.device)
    forward_rows(lm, plan.rows % lm.model.get_input_embeddings().num_embeddings, plan, buffer)


def _partial_prefill_once(lm: LanguageModel, passes: PrefillRunner, tokens: int) -> None:
    """Compute rows of arbitrary tokens after one position that is in the buffer already."""
    plan = RowsPlan.between(1, min(tokens + 1, lm.window.tokens), lm.device, lm.sliding)
    buffer = KVBuffer.allocate(lm.shapes, plan.length, dtype=lm.dtype, device=lm.device)
    for tensor in (*buffer.keys, *buffer.values):
        tensor[:, :, 0] = 0
    passes.forward_rows(plan.rows % lm.model.get_input_embeddings().num_embeddings, plan, buffer)


@torch.inference_mode()
def measure_loading(lm: LanguageModel, store: KVStore, *, samples: int = 3) -> float | None:
    """Return the median seconds of loading a token, over some stored passages; None if none can be read.

    In a tiered store, the farthest tier on this machine is measured, whatever is in memory at the moment; a remote is
    not asked for its entries. An error of the store is no error here.
    """
    local_tiers = [tier for tier in store.tiers if tier.folder is not None] or store.tiers[:1]
    measured_store = store if store.prefix else local_tiers[-1]
    try:
        times = list(islice(_loading_times(lm, measured_store), samples))
    except (QCFuseError, RuntimeError, KeyError, *INDEX_FAILURES):
        return None
    return median(times) if times else None


def _loading_times(lm: LanguageModel, store: KVStore) -> Iterator[float]:
    """Yield the seconds per token of loading each stored passage of the model.

    System prefixes are left out because they are short, and captured entries because no request loads them. Each
    passage is read once and copied to the model's device: what the operating system has cached is read as fast as it
    will be the next time. The store is not changed.
    """
    bases = [name for name in BASES if name != BLIND.name]
    for entry in store.entries():
        opened = store.open(entry.address)
        if not isinstance(opened, tuple):
            continue
        key, chunk = opened
        if key.fingerprint != lm.fingerprint or key.base.split("+")[0] not in bases:
            continue
        buffer = KVBuffer.allocate(lm.shapes, chunk.n_tokens, dtype=lm.dtype, device=lm.device)
        with suppress(CorruptEntry, OSError):  # a damaged entry is skipped
            yield timed(lm, partial(copy_chunk, buffer, 0, chunk, ropes=lm.ropes)) / chunk.n_tokens


def timed(lm: LanguageModel, work: Callable[[], object]) -> float:
    """Return the seconds that some work takes on the host and the model's device."""
    started = time.perf_counter()
    work()
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
    return time.perf_counter() - started


def costs_path(folder: Path, lm: LanguageModel, recorded: bool = False) -> Path:
    """Return the file of a model's costs on this machine; deleting it makes the next process measure again.

    Args:
        folder: the store's folder.
        lm: the model.
        recorded: whether passes are recorded.
    """
    device = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else platform.machine()
    machine = f"{lm.fingerprint.digest} {device} {os.cpu_count()} {torch.get_num_threads()}"
    machine += " recorded" if recorded else ""
    return folder / f"costs-{digest(machine.encode())}.json"


def read_costs(path: Path) -> Costs | None:
    """Read a file of `save_costs`; None if it does not exist or is damaged."""
    try:
        data = json.loads(read_text(path))
        recorded_pass_s = data.get("recorded_pass_s")
        numbers = {name: float(data[name]) for name in ("pass_s", "row_s", "load_s")}
        return Costs(**numbers, recorded_pass_s=None if recorded_pass_s is None else float(recorded_pass_s))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def save_costs(costs: Costs, path: Path) -> None:
    """Save costs for later processes, unless a valid file exists. A folder that is not writable is left alone."""
    if read_costs(path) is not None:
        return
    with suppress(OSError):
        write_atomically(path, json.dumps(asdict(costs)))
