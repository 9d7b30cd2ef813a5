"""Predict the time of a prefill on this machine, by coefficients that are measured here."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from statistics import median

import torch

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.errors import CorruptEntry, QCFuseError
from qcfuse_rag.models.cpu_weights import processor_name
from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.runtime.attention.dispatch import dense_attention_name
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.device import fastest_s, timed
from qcfuse_rag.runtime.forward import forward_rows
from qcfuse_rag.runtime.graphs.runners import PrefillRunner
from qcfuse_rag.runtime.kernels.support import kernels_available
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.layer_loader import LayerLoader, WaitBudget, call_with_timeout
from qcfuse_rag.runtime.loading.sources import LateMissError, LoadingChunk
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.backends.index import INDEX_FAILURES
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import BASES, BLIND

SAMPLES = 3
"""Timed passes of each size; the fastest counts, because other work disturbs it least."""
FEW_ROWS = 16
"""Rows of the shortest timed pass: on a CPU it mostly reads weights, on a GPU it takes as long as launching it."""
CPU_ROWS = 128
"""Rows of the longer timed pass on a CPU."""
GPU_ROWS = (4096, 8192)
"""Rows of the longer timed passes on a GPU; two, because the keys that rows see cost time as well."""
LAUNCH_BOUND = 1.05
"""A pass on a GPU that takes at most so many times as long as one of few rows may wait for the host."""
APART = 1.5
"""Sizes that differ by less show no difference but noise."""
LOADS, PASSAGES_PER_LOAD = 3, 4
"""Loads that are timed, and passages of each if the store has so many; the median of the loads counts."""
HELD_BYTES = 512 << 20
"""Most bytes of copies that are kept from one load to the next, so that the next load needs new memory."""


@dataclass(frozen=True, slots=True)
class PrefillEstimate:
    """The work of a fused prefill, estimated before anything is loaded.

    Attributes:
        prompt_tokens: length of the prompt, without `held_tokens`.
        stored_tokens: tokens of its segments that the store has.
        selected_tokens: stored tokens that would be recomputed.
        probe_rows: rows that the method's probe computes; 0 without a probe.
        probe_share: share of the layers that the probe runs.
        passages: number of passages in the prompt.
        absent: number of passages that the store does not have.
        near_tokens: tokens of its segments that the store's nearest tier has.
        held_tokens: leading tokens whose keys and values an earlier request computed.
    """

    prompt_tokens: int
    stored_tokens: int
    selected_tokens: int
    probe_rows: int
    probe_share: float
    passages: int = 0
    absent: int = 0
    near_tokens: int = 0
    held_tokens: int = 0

    @property
    def all_near(self) -> PrefillEstimate:
        """The estimate if the nearest tier had all that is stored."""
        return replace(self, near_tokens=self.stored_tokens)

    @property
    def rows(self) -> int:
        """Rows that the fused pass would compute."""
        return self.prompt_tokens - self.stored_tokens + self.selected_tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """Six costs in seconds that predict a prefill, and one more where layers are recurrent.

    To compute `R` rows that see `K` keys each takes `R (row_s + K key_s)`. On a CPU, a pass takes `pass_s` and that. On
    a GPU, it takes the longer of both: the host launches kernels while the device computes. A pass that is recorded as
    CUDA graphs has `recorded_pass_s` in place of `pass_s`. To load a token takes `near_load_s` if the nearest tier has
    it, else `load_s`.

    Attributes:
        pass_s: the fixed cost of a pass: reading the weights on a CPU, launching kernels on a GPU.
        row_s: the cost of each row.
        load_s: the cost of loading a token that the nearest tier does not have.
        near_load_s: the same of a token that it has; None if it is `load_s`.
        key_s: the cost of each key that a row sees. It is measured on GPUs only: on a CPU a pass that is long enough
            takes many seconds, so that full prefill of a long prompt takes longer than predicted.
        recorded_pass_s: the fixed cost of a recorded pass in a fused prefill, its share of the lookups included.
        recorded_rows: most rows of a recorded pass; 0 without recordings.
        overlaps: whether launching and loading take no time from computing: on a GPU.
        scan_s: the cost of each token over which the recurrences of a pass run; it is a part of `row_s`. A fused pass
            has it for all tokens before its last row.
    """

    pass_s: float
    row_s: float
    load_s: float = 0.0
    near_load_s: float | None = None
    key_s: float = 0.0
    recorded_pass_s: float = 0.0
    recorded_rows: int = 0
    overlaps: bool = False
    scan_s: float = 0.0

    def full_pass_s(self, rows: int, held: int = 0) -> float:
        """Predict the seconds of a pass over a whole prompt that follows `held` tokens with cached keys and values."""
        return self._pass_s(self.pass_s, rows, held + rows / 2)

    def partial_pass_s(self, rows: int, keys: float = 0, share: float = 1.0, length: int = 0) -> float:
        """Predict the seconds of a pass over some rows of `length` tokens, through a share of the layers.

        The rows see so many keys.
        """
        fixed_s = self.pass_s if rows > self.recorded_rows else self.recorded_pass_s
        return share * self._pass_s(fixed_s, rows, keys, max(0, length - rows))

    def _pass_s(self, fixed_s: float, rows: int, keys: float, others: int = 0) -> float:
        computing_s = rows * (self.row_s + keys * self.key_s) + others * self.scan_s
        if not rows:
            return 0.0
        return max(fixed_s, computing_s) if self.overlaps else fixed_s + computing_s

    def fused_s(self, estimate: PrefillEstimate) -> float:
        """Predict the seconds of a fused prefill.

        The probe's rows see the whole prompt. Recomputed rows are spread over it, and see half of it. What the nearest
        tier does not have is copied there first.
        """
        near_load_s = self.load_s if self.near_load_s is None else self.near_load_s
        copy_s = (estimate.stored_tokens - estimate.near_tokens) * (self.load_s - near_load_s)
        load_s = estimate.stored_tokens * near_load_s
        held, tokens = estimate.held_tokens, estimate.prompt_tokens
        probe_s = self.partial_pass_s(estimate.probe_rows, held + tokens, estimate.probe_share, held + tokens)
        rows_s = self.partial_pass_s(estimate.rows, held + tokens / 2, length=held + tokens)
        if not self.overlaps:
            return copy_s + load_s + probe_s + rows_s
        return copy_s + (max(load_s, probe_s) + rows_s if probe_s else max(load_s, rows_s))


class MeasuredCosts:
    """The costs of a model over a store on this machine; call the object to get them.

    The first call measures them. A method with a guard makes it at the first prompt with a stored chunk; calling
    earlier, when the store holds passages, saves that prompt a second or two. The costs are kept in the store's folder,
    so they stay the same for all requests and after a restart on the same kind of machine. Safe to call from several
    threads.

    Attributes:
        recorded_pass_s: see `Costs`; None until `engine.first_passes` has measured it, which it does where passes are
            recorded. It is not kept in the file.
    """

    def __init__(self, lm: LanguageModel, store: KVStore, passes: PrefillRunner) -> None:
        self._lm, self._store, self._passes = lm, store, passes
        self._costs: Costs | None = None
        self.recorded_pass_s: float | None = None
        self._lock = threading.Lock()

    def __call__(self, limit_s: float | None = None) -> Costs:
        """Return the costs; loading costs 0 as long as the store holds nothing to measure it with.

        Raises:
            TimeoutError: if the store does not answer in `limit_s` seconds. Passes stay measured.
        """
        with self._lock:
            if self._costs is None or not self._costs.load_s:
                self._costs = self._measure(limit_s)
            if self.recorded_pass_s is None:
                return self._costs
            most_rows = self._passes.most_rows
            return replace(self._costs, recorded_pass_s=self.recorded_pass_s, recorded_rows=most_rows)

    def _measure(self, limit_s: float | None) -> Costs:
        path = costs_path(self._lm, self._store)
        saved = None if path is None else read_costs(path)
        if saved is not None:
            return saved
        self._costs = self._costs or measure_passes(self._lm)
        times = call_with_timeout(limit_s, partial(measure_loading, self._lm, self._store))
        if times is None:
            return self._costs
        costs = replace(self._costs, load_s=times[0], near_load_s=times[1])
        if path is not None:
            with suppress(OSError):  # a folder that is not writable is left alone
                write_atomically(path, json.dumps(asdict(costs)))
        return costs


def costs_path(lm: LanguageModel, store: KVStore) -> Path | None:
    """Return the file of a model's costs on this machine; deleting it makes the next process measure again.

    It is in the store's folder; None if the store has none. The store's tiers and its format count.
    """
    if store.folder is None:
        return None
    facts = (
        tuple(Costs.__dataclass_fields__),
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


def read_costs(path: Path) -> Costs | None:
    """Read a file of costs; None if it does not exist, is damaged, or lacks a cost."""
    try:
        data = json.loads(path.read_text())
        kinds = asdict(Costs(0.0, 0.0, near_load_s=0.0))
        return Costs(**{name: type(kind)(data[name]) for name, kind in kinds.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


@torch.inference_mode()
def measure_passes(lm: LanguageModel) -> Costs:
    """Time a few prefills; loading costs nothing yet."""
    on_gpu = overlaps(lm)
    sizes = [min(size, lm.context_window.tokens) for size in (FEW_ROWS, *(GPU_ROWS if on_gpu else (CPU_ROWS,)))]
    prefill_once(lm, sizes[0])  # a process's first pass pays for one-time setup
    few_s, times_s = fastest_s(lm.device, partial(prefill_once, lm, sizes[0]), SAMPLES), dict[int, float]()
    for size in sizes[1:]:
        with suppress(torch.OutOfMemoryError):
            times_s[size] = fastest_s(lm.device, partial(prefill_once, lm, size), SAMPLES)
    scan_s = _scan_cost(lm, sizes[0], max(times_s, default=0), few_s) if lm.recurrent else 0.0
    if on_gpu:
        row_s, key_s = _row_costs(few_s, times_s)
        return Costs(few_s, row_s, key_s=key_s, overlaps=True, scan_s=scan_s)
    row_s = max(times_s[sizes[1]] - few_s, 1e-9) / max(1, sizes[1] - sizes[0])
    return Costs(max(0.0, few_s - sizes[0] * row_s), row_s, scan_s=min(scan_s, row_s))


def _scan_cost(lm: LanguageModel, rows: int, length: int, few_s: float) -> float:
    """Return the seconds of each token before the rows of a pass, by a pass over the last rows of a longer text."""
    if length <= rows:
        return 0.0
    buffer = lm.empty_buffer(length)
    prefill_once(lm, length, buffer)
    last_s = fastest_s(lm.device, partial(prefill_once, lm, length, buffer, length - rows), SAMPLES)
    return max(0.0, last_s - few_s) / (length - rows)


def _row_costs(launch_s: float, times_s: dict[int, float]) -> tuple[float, float]:
    """Return the seconds of a row and of each key that it sees, `b` and `c` of `b T + c T² / 2` through two lengths."""
    computed = sorted((size, time_s) for size, time_s in times_s.items() if time_s > LAUNCH_BOUND * launch_s)
    if not computed:  # passes that take hardly longer than launching tell nothing
        size = max(times_s, default=1)
        return max(0.0, times_s.get(size, launch_s) - launch_s) / size, 0.0
    (size, time_s), (longest, longest_s) = computed[0], computed[-1]
    row_s, key_s = time_s / size, 0.0
    if longest >= APART * size:  # the keys take at most half of the shorter time
        key_s = min(max(0.0, 2 * (longest_s / longest - row_s) / (longest - size)), row_s / size)
    return row_s - key_s * size / 2, key_s


def overlaps(lm: LanguageModel) -> bool:
    """Return whether the host launches and loads while the device computes."""
    return lm.device.type == "cuda"


def prefill_once(lm: LanguageModel, tokens: int, buffer: KVBuffer | None = None, first: int = 0) -> None:
    """Compute a full prefill of arbitrary tokens, or those from `first` on over a buffer, without a state."""
    buffer, plan = buffer or lm.empty_buffer(tokens), RowsPlan.between(first, tokens, lm.device, lm.sliding)
    buffer.states.clear()
    forward_rows(lm, plan.rows % lm.model.get_input_embeddings().num_embeddings, plan, buffer)


LoadTimes = tuple[float, float]
"""Seconds of loading a token that the nearest tier does not have, and of one that it has."""


@torch.inference_mode()
def measure_loading(lm: LanguageModel, store: KVStore) -> LoadTimes | None:
    """Return the median times of loading a token; None if no passage can be read. The store's entries stay as they are.

    Passages are loaded from the farthest tier on this machine as by a request; a tier in memory copies them first.
    """
    nearest = store.tiers[0] if len(store.tiers) > 1 else None
    memory = nearest if isinstance(nearest, MemoryStore) else None
    farthest = next((tier for tier in reversed(store.tiers) if tier.folder is not None), store.tiers[0])
    try:
        chunks = _stored_chunks(lm, farthest, store.prefix)
        size = max(1, len(chunks) // LOADS)
        held: list[ChunkKV] = []
        times: list[LoadTimes] = []
        for start in range(0, len(chunks), size)[:LOADS]:
            found = _load_once(lm, chunks[start : start + size], memory, held)
            times += [found] if found else []
            while sum(chunk.nbytes for chunk in held) > HELD_BYTES:
                held.pop(0)
    except (QCFuseError, RuntimeError, KeyError, ValueError, *INDEX_FAILURES):
        return None
    if not times:
        return None
    return median(far_s for far_s, _ in times), median(near_s for _, near_s in times)


def _stored_chunks(lm: LanguageModel, store: KVStore, prefix: str) -> list[ChunkKV]:
    """Return some stored passages of the model; where there are none, what is stored blind, such as a system prefix."""

    def read(bases: Collection[str]) -> Iterator[ChunkKV]:
        for entry in store.entries():
            opened = store.open(entry.address) if entry.address.startswith(prefix) else None
            if isinstance(opened, tuple):
                key, chunk = opened
                if key.fingerprint == lm.fingerprint and key.base.split("+")[0] in bases:
                    yield chunk

    count = LOADS * PASSAGES_PER_LOAD
    return list(islice(read(BASES.keys() - {BLIND.name}), count)) or list(islice(read({BLIND.name}), count))


def _load_once(
    lm: LanguageModel,
    chunks: Sequence[ChunkKV],
    memory: MemoryStore | None,
    held: list[ChunkKV],
) -> LoadTimes | None:
    """Return the seconds per token of loading those passages that can be read; None if none can.

    `held` takes the copies in memory: page-locking new memory takes longer than filling it, and a request's copies need
    new memory.
    """
    ends = list(accumulate(chunk.n_tokens for chunk in chunks))
    starts = [0, *ends[:-1]]
    buffer = lm.empty_buffer(ends[-1])
    near = [*chunks]

    def copy_near() -> None:
        assert memory is not None
        for place, (start, chunk) in enumerate(zip(starts, chunks, strict=True)):
            try:
                near[place] = memory.copy_of(chunk)
                held.append(near[place])
            except torch.OutOfMemoryError:
                break  # the others are loaded from where they are
            except (CorruptEntry, OSError, ValueError) as error:
                raise LateMissError({start: Miss(str(error))}) from error

    def load() -> None:
        loading = [LoadingChunk(start, chunk) for start, chunk in zip(starts, near, strict=True)]
        loader = LayerLoader(buffer, lm.ropes, loading, transfer=lm.transfer(), wait_budget=WaitBudget(None))
        try:
            loader.wait()
        finally:
            loader.stop()

    try:
        copy_s = 0.0 if memory is None else timed(lm.device, copy_near)
        load_s = timed(lm.device, load)
    except LateMissError as late:
        readable = [chunk for start, chunk in zip(starts, chunks, strict=True) if start not in late.misses]
        return _load_once(lm, readable, memory, held) if readable else None
    return (copy_s + load_s) / ends[-1], load_s / ends[-1]
