"""What a pass costs here: two numbers measured on the model, one on the store, and the time they predict."""

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
from qcfuse_rag.store.backends.disk_index import INDEX_FAILURES
from qcfuse_rag.store.prefill_base import BASES, BLIND

SIZES = {"cpu": (16, 16, 128), "cuda": (16, 1024, 4096)}
"""Rows of the passes that are timed: few, which mostly launch and read the weights, and two between which there is
nothing but multiplying. A GPU takes as long for some hundred rows as for few."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds by which a prefill is predicted: a pass over `R` rows takes `pass_s + R row_s`.

    Attention over long prompts is left out. It makes full prefill, whose rows are many, slower than predicted.

    Attributes:
        pass_s: a pass, whatever its size.
        row_s: each row besides.
        load_s: each token that is loaded from the store.
        recorded_pass_s: a pass over some rows of a prompt where those are recorded, instead of `pass_s`; else None.
    """

    pass_s: float
    row_s: float
    load_s: float = 0.0
    recorded_pass_s: float | None = None

    def compute(self, rows: int) -> float:
        """Predict a pass over a whole prompt."""
        return self.pass_s + rows * self.row_s if rows else 0.0

    def compute_some(self, rows: int, share: float = 1.0) -> float:
        """Predict a pass over so many rows of a prompt through a share of the layers."""
        pass_s = self.pass_s if self.recorded_pass_s is None else self.recorded_pass_s
        return share * (pass_s + rows * self.row_s) if rows else 0.0

    def load(self, tokens: int) -> float:
        """Predict how long so many tokens take to load."""
        return tokens * self.load_s


@torch.inference_mode()
def measure_passes(lm: LanguageModel, passes: PrefillRunner | None = None, *, samples: int = 2) -> Costs:
    """Time a few prefills; the best of the samples counts, which other work on the machine disturbs least.

    Args:
        lm: the model.
        passes: of the model, recorded ones perhaps.
        samples: of each.
    """
    few, fewer, many = (min(size, lm.window.tokens) for size in SIZES.get(lm.device.type, SIZES["cpu"]))
    prefill_once(lm, few)  # the first pass of a process pays for much that later ones do not
    taken = {
        size: min(timed(lm, partial(prefill_once, lm, size)) for _ in range(samples))
        for size in sorted({few, fewer, many})
    }
    short = taken[few]
    row_s = max(taken[many] - taken[fewer], 1e-9) / max(1, many - fewer)
    recorded_pass_s = None
    if passes is not None and passes.refusal is None:
        before = passes.replayed
        some = min(timed(lm, partial(_some_rows_once, lm, passes, few)) for _ in range(samples + 1))
        if passes.replayed > before:  # else others were running recorded passes all the time
            recorded_pass_s = max(0.0, some - few * row_s)
    return Costs(max(0.0, short - few * row_s), row_s, recorded_pass_s=recorded_pass_s)


@torch.inference_mode()
def measure_loading(lm: LanguageModel, store: KVStore, *, samples: int = 3) -> float | None:
    """Return the median seconds to load a token, over some passages; None if none could be read.

    Of several tiers the farthest on this machine counts, whatever is in memory at the moment; a remote is not asked
    what it has. The prompt's head, which is short, stands for nothing. Whatever fails, no question fails with it.
    """
    here = [tier for tier in store.tiers if tier.folder is not None] or store.tiers[:1]
    place = store if store.prefix else here[-1]
    try:
        loads = list(islice(load_times(lm, place, heads=False), samples))
    except (QCFuseError, RuntimeError, KeyError, *INDEX_FAILURES):
        return None
    return median(loads) if loads else None


def load_times(lm: LanguageModel, store: KVStore, *, heads: bool = True) -> Iterator[float]:
    """Yield seconds a token, one stored passage after the other; what was captured is not what a request loads.

    Each is read once from the tier it is in and copied to the model's device: what the operating system still has in
    memory is read as fast as it will be next time. Nothing is changed in the store.

    Args:
        lm: the model.
        store: where passages are.
        heads: take what is stored blind too, as a prompt's head is.
    """
    bases = [name for name in BASES if heads or name != BLIND.name]
    for entry in store.entries():
        opened = store.open(entry.address)
        if not isinstance(opened, tuple):
            continue
        key, chunk = opened
        if key.fingerprint != lm.fingerprint or key.base.split("+")[0] not in bases:
            continue
        buffer = KVBuffer.allocate(lm.shapes, chunk.n_tokens, dtype=lm.dtype, device=lm.device)
        with suppress(CorruptEntry, OSError):  # the next one will do
            yield timed(lm, partial(copy_chunk, buffer, 0, chunk, ropes=lm.ropes)) / chunk.n_tokens


def prefill_once(lm: LanguageModel, tokens: int) -> None:
    """Compute so many rows that mean nothing."""
    plan = RowsPlan.between(0, tokens, lm.device, lm.sliding)
    buffer = KVBuffer.allocate(lm.shapes, tokens, dtype=lm.dtype, device=lm.device)
    forward_rows(lm, plan.rows % lm.model.get_input_embeddings().num_embeddings, plan, buffer)


def _some_rows_once(lm: LanguageModel, passes: PrefillRunner, tokens: int) -> None:
    """Compute so many rows that mean nothing, behind one that is there."""
    plan = RowsPlan.between(1, min(tokens + 1, lm.window.tokens), lm.device, lm.sliding)
    buffer = KVBuffer.allocate(lm.shapes, plan.length, dtype=lm.dtype, device=lm.device)
    for held in (*buffer.keys, *buffer.values):
        held[:, :, 0] = 0
    passes.forward_rows(plan.rows % lm.model.get_input_embeddings().num_embeddings, plan, buffer)


def timed(lm: LanguageModel, work: Callable[[], object]) -> float:
    """Return how many seconds some work takes, the device's share included."""
    started = time.perf_counter()
    work()
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)
    return time.perf_counter() - started


class MeasuredCosts:
    """Call it for the costs of a model over a store on this machine.

    Measured when first asked for, which methods with a guard do at the first prompt of which something is stored;
    asking before, with passages in the store, spares that prompt a second or two. Kept in the store's folder: neither
    requests nor a restart on the same kind of machine change them, so no answer depends on those before. Safe to call
    from several threads.

    Args:
        lm: the model.
        store: where passages are.
        passes: of the model; once they are recorded, costs are measured anew, and kept by themselves.
    """

    def __init__(self, lm: LanguageModel, store: KVStore, passes: PrefillRunner | None = None) -> None:
        self._lm, self._store = lm, store
        self._passes = passes or PrefillRunner(lm)
        self._costs: Costs | None = None
        self._recorded = False
        self._measuring = threading.Lock()

    def __call__(self) -> Costs:
        """Return them; loading counts as free while there is nothing in the store to time it by."""
        with self._measuring:
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
                        self._costs = read_costs(path) or self._costs  # another process may have been first
            return self._costs


def costs_path(folder: Path, lm: LanguageModel, recorded: bool = False) -> Path:
    """Return where a model's costs on this machine are kept in a store's folder; remove the file to measure anew.

    Args:
        folder: of the store.
        lm: the model.
        recorded: whether fused passes are.
    """
    device = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else platform.machine()
    machine = f"{lm.fingerprint.digest} {device} {os.cpu_count()} {torch.get_num_threads()}"
    machine += " recorded" if recorded else ""
    return folder / f"costs-{digest(machine.encode())}.json"


def read_costs(path: Path) -> Costs | None:
    """Read what `save_costs` wrote; None if it is not there or no such file."""
    try:
        found = json.loads(path.read_text("utf-8"))
        recorded = found.get("recorded_pass_s")
        numbers = {name: float(found[name]) for name in ("pass_s", "row_s", "load_s")}
        return Costs(**numbers, recorded_pass_s=None if recorded is None else float(recorded))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def save_costs(costs: Costs, path: Path) -> None:
    """Keep costs, so that the next process decides as this one, unless they are kept already.

    A folder that cannot be written goes without.
    """
    if read_costs(path) is not None:
        return
    with suppress(OSError):
        write_atomically(path, json.dumps(asdict(costs)))
