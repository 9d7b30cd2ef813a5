"""The costs an engine goes by: measured once, kept beside its store, and then left as they are."""

from __future__ import annotations

import json
import os
import platform
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from qcfuse_rag.fuse.costs import Costs, measure_loading, measure_passes
from qcfuse_rag.fuse.pass_graph import FusedPasses
from qcfuse_rag.model.fingerprint import digest
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.store.contract import KVStore
from qcfuse_rag.store.whole import write_whole


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

    def __init__(self, lm: LanguageModel, store: KVStore, passes: FusedPasses | None = None) -> None:
        self._lm, self._store = lm, store
        self._passes = passes or FusedPasses(lm)
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
        write_whole(path, json.dumps(asdict(costs)))
