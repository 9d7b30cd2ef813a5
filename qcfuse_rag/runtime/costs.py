"""Predict the time of a prefill from costs, which are kept in a file; `measured_costs` measures them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.models.cpu_dtype import processor_name
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.attention.dense import dense_attention_name
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore

TIMED_ROWS = 512
"""Rows of a recorded pass that cost `Costs.recorded_row_s` each: the device reads weights for about as long as it
computes so many."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds that predict a prefill.

    The rows of a whole prompt of `T` tokens take `T row_s + T² / 2 attended_key_s` together. `R` rows of a prompt,
    which see `K` keys each, take `R row_s + R K sparse_attended_key_s` together. A pass takes `pass_s` more, or at
    least `pass_s` if `launches_overlap`. A recorded pass takes `recorded_pass_s + R recorded_row_s + R K
    sparse_attended_key_s`, and of its rows those beyond `TIMED_ROWS` cost `row_s` each.

    Attributes:
        pass_s: the fixed cost of a pass.
        row_s: the cost of each row.
        load_s: the cost of loading a token from the store, by the path that requests take.
        near_load_s: the same of a token that the nearest tier has; None if it is `load_s`.
        launches_overlap: whether a pass's fixed cost is launching kernels, beside which rows are computed: on a GPU.
        recorded_rows: most rows of a pass that is recorded as CUDA graphs; 0 without recordings.
        recorded_pass_s: the fixed cost of such a pass.
        recorded_row_s: the cost of each row of such a pass.
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
    launches_overlap: bool = False
    recorded_rows: int = 0
    recorded_pass_s: float = 0.0
    recorded_row_s: float = 0.0
    attended_key_s: float = 0.0
    sparse_attended_key_s: float = 0.0
    loading_overlaps: bool = False
    overhead_s: float = 0.0

    def full_pass_s(self, rows: int, held: int = 0) -> float:
        """Predict the seconds of a pass over a whole prompt that follows `held` tokens with cached keys and values."""
        return self._launched_s(rows * (self.row_s + (held + rows / 2) * self.attended_key_s)) if rows else 0.0

    def _launched_s(self, rows_s: float) -> float:
        """Return the seconds of a pass that is launched kernel by kernel, and whose rows take so many seconds."""
        return max(self.pass_s, rows_s) if self.launches_overlap else self.pass_s + rows_s

    def partial_pass_s(self, rows: int, keys: float = 0, share: float = 1.0) -> float:
        """Predict the seconds of a pass over some rows of a prompt.

        Args:
            rows: their number.
            keys: the keys that each row sees.
            share: share of the layers that the pass runs through.
        """
        if not rows:
            return 0.0
        keys_s = rows * keys * self.sparse_attended_key_s
        if rows > self.recorded_rows:
            return share * self._launched_s(rows * self.row_s + keys_s)
        few = min(rows, TIMED_ROWS)
        return share * (self.recorded_pass_s + few * self.recorded_row_s + (rows - few) * self.row_s + keys_s)

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
        data = json.loads(path.read_text())
        kinds = asdict(Costs(0.0, 0.0, near_load_s=0.0))
        values: dict[str, Any] = {name: type(kind)(data[name]) for name, kind in kinds.items()}
        return Costs(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def save_costs(costs: Costs, path: Path) -> None:
    """Save costs for later processes, unless a valid file exists. A folder that is not writable is left alone."""
    if read_costs(path) is not None:
        return
    with suppress(OSError):
        write_atomically(path, json.dumps(asdict(replace(costs, overhead_s=0.0))))
