"""Learn what passes and loading take on this machine from those that the engine runs anyway.

Other work on a machine makes a pass slower, never faster. So a fast one counts of the last passes of a size, and costs
are fitted to these by least squares of relative errors, which hardly follow a pass that took much too long. What passes
do not tell yet, such as the cost of a key before there was a long prompt, comes from the usual proportions.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from statistics import median_low

import numpy as np
import torch

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.models.cpu_weights import processor_name
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.attention.dispatch import dense_attention_name
from qcfuse_rag.runtime.cost import Costs, PrefillEstimate
from qcfuse_rag.runtime.graphs.runners import PrefillRunner
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore

FORMAT = "samples-1"
SAMPLES, RECENT = 8, 6
"""Passes of a size, and loads, that count; and passes of prompts that tell how busy the machine is: the last ones."""
TRUST = 4.5
"""A kept sample counts if this process's passes predict its seconds within this factor, about the root of 20."""
HALF_LIFE_S = 30 * 86400.0
"""Age at which a sample counts half."""
LOAD_OF_A_ROW = 0.1
"""What loading a token usually takes, beside computing it."""
TIE, ROWS_OF_A_PASS, SCAN_OF_A_ROW = 0.02, 40.0, 0.5
"""The weight, beside a sample, of what is usual: a pass costs so many rows, a recurrence's token this share of one."""
LAUNCH_BOUND = 1.05
"""A pass on a GPU that takes at most so many times as long as the shortest may wait for the host."""
CHANGED = 1.1
"""A file is written when a sample's seconds have changed by this factor."""


Size = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a pass, or loading a token, took.

    Attributes:
        kind: `pass`, through all layers; or `near` and `far` for a token from the store's nearest tier and another.
        rows, keys, others: of a pass, the keys that a row sees in the mean, and tokens before the last that are no row.
        count, at: how many passes or loads it stands for, and when the last was, in seconds since 1970.
    """

    kind: str
    seconds: float
    rows: float = 0.0
    keys: float = 0.0
    others: float = 0.0
    count: int = 1
    at: float = 0.0

    @property
    def size(self) -> Size:
        """Samples of one size are compared."""
        return self.kind, int(self.rows).bit_length(), int(self.keys).bit_length() // 2

    @property
    def work(self) -> tuple[float, ...]:
        """How often a pass pays for itself, for a row, for a key and for a token of a recurrence."""
        return 1.0, self.rows, self.rows * self.keys, self.others


Samples = dict[Size, Sample]
NEAR, FAR = Sample("near", 0.0).size, Sample("far", 0.0).size


class LearnedCosts:
    """The costs of a model over a store on this machine, as far as they are known; call the object to get them.

    They are kept in the store's folder; what is kept counts until this process's own passes contradict it. `passes`
    knows which passes are recorded. Safe to use from several threads.

    Attributes:
        recorded_pass_s: see `Costs`; None until `engine.first_passes` has measured it. It is not kept.
        refusals: number of prompts in a row that the guard refused to fuse for costs that only fusing teaches.
    """

    def __init__(self, lm: LanguageModel, store: KVStore, passes: PrefillRunner) -> None:
        self._lm, self._store, self._passes = lm, store, passes
        # Attention to a key takes 4 h operations a layer, a row's products 24 h² at twice the rate.
        key = 2 / (6 * lm.model.get_input_embeddings().embedding_dim)
        self._usual = np.array([ROWS_OF_A_PASS, 1.0, key, SCAN_OF_A_ROW if lm.recurrent else 0.0])
        self._own: dict[Size, deque[Sample]] = {}
        self._recent: deque[Sample] = deque(maxlen=RECENT)
        self._kept: Samples | None = None
        self._written: dict[Size, int] = {}
        self._lock = threading.RLock()
        self.recorded_pass_s: float | None = None
        self.refusals = 0

    def __call__(self) -> Costs | None:
        """Return the costs at the machine's present pace; None before any pass is known.

        Loading that is not known costs what is usual beside a row.
        """
        with self._lock:
            known = self._known()
            costs = self._fit(known.values())
            if costs is None:
                return None
            pace = median_low([sample.seconds / _predicted_s(sample, costs) for sample in self._recent] or [1.0])
        near, far = known.get(NEAR), known.get(FAR, known.get(NEAR))
        if self.recorded_pass_s is not None:
            costs = replace(costs, recorded_pass_s=self.recorded_pass_s, recorded_rows=self._passes.most_rows)
        usual_s = LOAD_OF_A_ROW * costs.row_s
        costs = replace(costs, load_s=far.seconds if far else usual_s, near_load_s=near.seconds if near else None)
        return costs.at_pace(pace)

    def observe_pass(self, rows: float, keys: float, seconds: float, others: float = 0.0) -> Sample:
        """Learn from a pass through all layers; see `Sample`."""
        return self._observe(Sample("pass", seconds, rows, keys, others, at=time.time()))

    def observe_prefill(
        self, estimate: PrefillEstimate, *, load_s: float, probe_s: float, recompute_s: float, parts: int = 1
    ) -> None:
        """Learn from the stages of a prefill whose work was as estimated; its rows were computed in so many passes."""
        length, near = estimate.held_tokens + estimate.prompt_tokens, estimate.near_tokens
        far, seen = estimate.stored_tokens - near, Costs(0, 0, overlaps=overlaps(self._lm)).keys_of_rows(estimate)
        probe = (estimate.probe_rows, 1, length, probe_s / estimate.probe_share)
        with self._lock:
            for all_rows, count, keys, seconds in (probe, (estimate.rows, parts, seen, recompute_s)):
                if all_rows and (all_rows == length or all_rows > self._passes.most_rows):  # others are recorded
                    sample = self.observe_pass(all_rows / count, keys, seconds / count, length - all_rows)
                    self._recent.append(sample)
            load_s += probe_s if overlaps(self._lm) and load_s > probe_s else 0.0  # loaded meanwhile, too
            if far:
                near_s = near * self._known().get(NEAR, Sample("near", 0.0)).seconds
                self._observe(Sample("far", max(load_s - near_s, load_s * far / (far + near)) / far, at=time.time()))
            elif near:
                self._observe(Sample("near", load_s / near, at=time.time()))

    def tries_again(self) -> bool:
        """Count a refusal; return whether to fuse all the same, as it may be wrong: the 2nd, 4th, 8th ... in a row."""
        self.refusals += 1
        return self.refusals > 1 and self.refusals & (self.refusals - 1) == 0

    def save(self) -> None:
        """Write what has been learned if it has changed; a folder that is not writable is left alone."""
        with self._lock:
            known = self._known()
            steps = {size: round(math.log(sample.seconds, CHANGED)) for size, sample in known.items()}
            changed, self._written = steps != self._written, steps
        path = costs_path(self._lm, self._store) if changed else None
        if path is not None and path.parent.is_dir():  # a folder that was removed stays away
            with suppress(OSError):
                write_atomically(path, json.dumps([asdict(sample) for sample in known.values()]), sync=False)

    def _observe(self, sample: Sample) -> Sample:
        sample = replace(sample, seconds=max(sample.seconds, 1e-9))
        with self._lock:
            self._own.setdefault(sample.size, deque(maxlen=SAMPLES)).append(sample)
        return sample

    def _known(self) -> Samples:
        """Return what counts of each size: this process's samples, and a kept one that they do not contradict."""
        if self._kept is None:
            path = costs_path(self._lm, self._store)
            self._kept = {} if path is None else read_samples(path)
        own = {size: self._fast(samples) for size, samples in self._own.items()}
        costs, known = self._fit(own.values()), Samples()
        for size, kept in self._kept.items():
            is_pass = kept.kind == "pass"
            expected_s = _predicted_s(kept, costs) if is_pass and costs else own.get(size, kept).seconds
            if 1 / TRUST < kept.seconds / expected_s < TRUST:
                known[size] = kept
        for size, samples in self._own.items():
            together = [*samples, known[size]] if size in known else list(samples)
            count = sum(sample.count for sample in together)
            known[size] = replace(self._fast(together), count=count, at=samples[-1].at)
        return known

    def _fast(self, samples: Iterable[Sample]) -> Sample:
        ranked = sorted(samples, key=lambda sample: sample.seconds / (self._usual @ sample.work))
        return ranked[len(ranked) // 4]

    def _fit(self, samples: Iterable[Sample]) -> Costs | None:
        """Fit non-negative costs to passes. On a GPU a short pass tells what launching takes, a longer one the rest."""
        passes = [sample for sample in samples if sample.kind == "pass"]
        if not passes:
            return None
        on_gpu, launch_s = overlaps(self._lm), min(sample.seconds for sample in passes)
        usual = self._usual * (0.0, 1.0, 1.0, 1.0) if on_gpu else self._usual
        if on_gpu:
            passes = [sample for sample in passes if sample.seconds > LAUNCH_BOUND * launch_s]
            if not passes:
                return Costs(launch_s, 0.0, overlaps=True)
        now = time.time()
        weights = [min(sample.count, SAMPLES) / SAMPLES * 0.5 ** ((now - sample.at) / HALF_LIFE_S) for sample in passes]
        work = np.array([sample.work for sample in passes]) * usual
        seconds, roots = np.array([sample.seconds for sample in passes]), np.sqrt(weights)
        row_s = float(np.median(seconds / work.sum(1)))  # by the usual proportions
        system = np.vstack([work * (roots * row_s / seconds)[:, None], TIE * np.eye(len(usual))])
        target, free = np.append(roots, np.full(len(usual), TIE)), usual > 0
        while True:
            found = np.zeros(len(usual))
            found[free] = np.linalg.lstsq(system[:, free], target, rcond=None)[0]
            if found.min() >= 0:
                break
            free[found.argmin()] = False
        pass_s, row_s, key_s, scan_s = (float(cost) for cost in found * usual * row_s)
        return Costs(launch_s if on_gpu else pass_s, row_s, key_s=key_s, overlaps=on_gpu, scan_s=min(scan_s, row_s))


def overlaps(lm: LanguageModel) -> bool:
    """Return whether the host launches and loads while the device computes."""
    return lm.device.type == "cuda"


def _predicted_s(sample: Sample, costs: Costs) -> float:
    return costs.partial_pass_s(math.ceil(sample.rows), sample.keys, length=math.ceil(sample.rows + sample.others))


def costs_path(lm: LanguageModel, store: KVStore) -> Path | None:
    """Return the file of what was learned of a model on this machine, in the store's folder; None if it has none.

    The store's tiers and its format count.
    """
    if store.folder is None:
        return None
    facts = (
        FORMAT,
        lm.fingerprint.digest,
        lm.device.type,
        torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else processor_name(),
        os.cpu_count(),
        torch.get_num_threads(),
        torch.__version__,
        dense_attention_name(lm.device, lm.dtype),
        kernels_available(lm.device, lm.dtype, lm.widest_head),
        store.kv_dtype,
        *(tier.kind for tier in store.tiers),
    )
    return store.folder / f"costs-{digest(' '.join(map(str, facts)).encode())}.json"


def read_samples(path: Path) -> Samples:
    """Read what was learned; nothing if the file does not exist or is damaged."""
    try:
        samples = [Sample(**fields) for fields in json.loads(path.read_text())]
        sound = all(sample.seconds > 0 and np.isfinite(astuple(sample)[1:]).all() for sample in samples)
        return {sample.size: sample for sample in samples} if sound else {}
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return {}
