"""Time what loading a token takes, from the nearest and the farthest tier of a store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from statistics import median
from typing import TYPE_CHECKING

import torch

from qcfuse_rag.errors import CorruptEntry, QCFuseError
from qcfuse_rag.runtime.device import timed
from qcfuse_rag.runtime.loading.host_to_device import HostToDevice, TransferOpener
from qcfuse_rag.runtime.loading.layer_loader import LayerLoader
from qcfuse_rag.runtime.loading.source import LateMissError, LoadingChunk
from qcfuse_rag.runtime.loading.wait_budget import WaitBudget
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.backends.index import INDEX_FAILURES
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.prefill_base import BASES, BLIND

if TYPE_CHECKING:
    from qcfuse_rag.runtime.language_model import LanguageModel

LOADS, PASSAGES_PER_LOAD = 3, 4
"""Loads that are timed, and passages of each if the store has so many; the median of the loads counts."""

HELD_BYTES = 512 << 20
"""Most bytes of copies that are kept from one load to the next, so that the next load needs new memory."""


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Seconds of loading a token.

    Attributes:
        far_s: of a token that the nearest tier does not have.
        near_s: of a token that it has; the same if there is only one tier.
    """

    far_s: float
    near_s: float


@torch.inference_mode()
def measure_loading(lm: LanguageModel, store: KVStore, transfers: TransferOpener) -> LoadTimes | None:
    """Return the median times of loading a token; None if no passage can be read.

    Passages are loaded as a request loads them, some at a time. If there is a tier in memory, they are copied as it
    copies them, and then loaded. The first measurement of a process copies into new memory. They come from the farthest
    tier on this machine. A remote is not asked for its entries, so a token that only a remote has counts as one of that
    tier. An error of the store is no error here.

    Args:
        lm: the model.
        store: the store, whose entries stay as they are.
        transfers: opens the transfers by which requests load.
    """
    nearest = store.tiers[0] if len(store.tiers) > 1 else None
    memory = nearest if isinstance(nearest, MemoryStore) else None
    try:
        chunks = _stored_chunks(lm, _farthest_tier(store), store.prefix)
        size = max(1, len(chunks) // LOADS)
        loads = [chunks[start : start + size] for start in range(0, len(chunks), size)][:LOADS]
        held: list[ChunkKV] = []
        times: list[LoadTimes] = []
        for load in loads:
            found = _load_once(lm, load, transfers.open(), memory, held)
            times += [found] if found else []
            while sum(chunk.nbytes for chunk in held) > HELD_BYTES:
                held.pop(0)
    except (QCFuseError, RuntimeError, KeyError, ValueError, *INDEX_FAILURES):
        return None
    if not times:
        return None
    return LoadTimes(median(load.far_s for load in times), median(load.near_s for load in times))


def _farthest_tier(store: KVStore) -> KVStore:
    """Return the farthest tier on this machine."""
    return next((tier for tier in reversed(store.tiers) if tier.folder is not None), store.tiers[0])


def _stored_chunks(lm: LanguageModel, store: KVStore, prefix: str) -> list[ChunkKV]:
    """Return some stored passages of the model and of one tenant; where there are none, what is stored blind.

    A system prefix is stored blind. It is often short, so it does not count beside passages. Captured entries are left
    out because no request loads them.
    """

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
    transfer: HostToDevice | None,
    memory: MemoryStore | None,
    held: list[ChunkKV],
) -> LoadTimes | None:
    """Return the seconds per token of loading passages one behind the other; None if none can be read.

    Each is read once: what the operating system has cached is read as fast as it will be the next time. Those that
    cannot be read are left out, and the others loaded again. `held` takes the copies in memory: to page-lock new memory
    takes longer than to fill it, and a passage that a request copies there needs new memory.
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
        loader = LayerLoader(buffer, lm.ropes, loading, transfer=transfer, wait_budget=WaitBudget(None))
        try:
            loader.wait()
        finally:
            loader.stop()

    try:
        copy_s = 0.0 if memory is None else timed(lm.device, copy_near)
        load_s = timed(lm.device, load)
    except LateMissError as late:
        readable = [chunk for start, chunk in zip(starts, chunks, strict=True) if start not in late.misses]
        return _load_once(lm, readable, transfer, memory, held) if readable else None
    return LoadTimes((copy_s + load_s) / ends[-1], load_s / ends[-1])
