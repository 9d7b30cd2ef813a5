"""Warm a store: prefill every chunk it does not have yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from qcfuse_rag.errors import CorruptEntry, PromptTooLong
from qcfuse_rag.ingest.base import BLIND, Base
from qcfuse_rag.ingest.prefill import prefill_chunk
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore

Progress = Callable[[int, int], None]
"""`(done, total) -> None`, called after every chunk."""


@dataclass(frozen=True, slots=True)
class WarmSummary:
    """What a warming job did.

    Attributes:
        chunks: chunks asked for, times bases; repetitions count once.
        warmed: prefilled now.
        present: found in the store.
        tokens: tokens prefilled.
        size_bytes: bytes of keys and values written.
        elapsed_s: seconds.
        failed: `(index, reason)` of chunks that cannot be stored, by first index among those given; questions prefill
            them as they come.
    """

    chunks: int
    warmed: int
    present: int
    tokens: int
    size_bytes: int
    elapsed_s: float
    failed: tuple[tuple[int, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def warm(
    lm: LanguageModel,
    store: KVStore,
    frame: tuple[int, ...],
    chunks: Iterable[tuple[int, ...]],
    *,
    bases: Iterable[Base],
    progress: Progress | None = None,
) -> WarmSummary:
    """Prefill chunks into a store. Chunks already there are left alone, so a job that stopped is simply run again.

    Args:
        lm: the model.
        store: where to.
        frame: ids of the prompt's fixed head; stored too.
        chunks: token ids of each chunk; empty ones are passed over.
        bases: under which bases to store each.
        progress: told after every chunk.

    Raises:
        StoreError: if the store cannot be written.
    """
    started = time.perf_counter()
    unique: dict[tuple[int, ...], int] = {}
    for index, ids in enumerate(chunks):
        if ids:
            unique.setdefault(ids, index)
    jobs = [(index, ids, base) for ids, index in unique.items() for base in bases]
    head = stored_head(lm, store, frame) if frame and jobs else None
    warmed = present = tokens = size = 0
    failed: list[tuple[int, str]] = []
    for done, (index, ids, base) in enumerate(jobs, start=1):
        key = base.key(lm.fingerprint, frame, ids)
        if key in store:
            present += 1
        else:
            try:
                chunk = prefill_chunk(lm, ids, prefix=head if base.behind_frame else None)
            except PromptTooLong as error:
                failed.append((index, str(error)))
            else:
                store.put(key, chunk)
                warmed, tokens, size = warmed + 1, tokens + len(ids), size + chunk.nbytes
        if progress is not None:
            progress(done, len(jobs))
    elapsed = time.perf_counter() - started
    return WarmSummary(len(jobs), warmed, present, tokens, size, elapsed, tuple(failed))


def stored_head(lm: LanguageModel, store: KVStore, frame: tuple[int, ...]) -> ChunkKV:
    """Return the keys and values of the prompt's fixed head, computing and storing them if need be."""
    key = BLIND.key(lm.fingerprint, frame, frame)
    found = store.get(key)
    if isinstance(found, ChunkKV):
        try:
            found.read()
        except CorruptEntry as error:
            store.discard(key, str(error))
        else:
            return found
    computed = prefill_chunk(lm, frame)
    store.put(key, computed)
    return computed
