"""Group a job's chunks into batches of similar length, and prefill them, in the job's own process or in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qcfuse_rag.ingestion.extension import ComputedBase, EntryPlan
from qcfuse_rag.ingestion.prefill import (
    Batch,
    PendingChunk,
    PrefillTarget,
    Ranker,
    instruction_ids,
    prefill_chunk,
    prefill_chunks,
)
from qcfuse_rag.store.backends.base import check_entry, lasting
from qcfuse_rag.store.chunk import ChunkKV, to_store_format
from qcfuse_rag.store.key import BLIND, Base
from qcfuse_rag.store.quantization import LOSSLESS

Item = TypeVar("Item")

BATCHES_PER_GROUP = 32
FULL_ENOUGH = 4
"""A batch of 1 / FULL_ENOUGH of the token limit uses the device well: it takes no item that needs much padding."""
TOO_SHORT = 0.9
"""An item shorter than this share of the batch's longest item needs much padding."""
COPIES_PER_TOKEN = 4
"""Tokens of a primer that count as one token of a batch: their copies take memory, but are not computed."""


def plan_batches(
    work: Sequence[PendingChunk],
    *,
    batch_tokens: int,
    extra: int,
    primer_tokens: int = 0,
    plans: Mapping[Base, EntryPlan] | None = None,
) -> Iterator[Batch]:
    """Yield batches of chunks of at most `batch_tokens` tokens, those of derived bases last.

    Every chunk needs `extra` tokens besides its own, such as the ranking instruction. The work is in order, the most
    wanted first. The primer is copied in front of every chunk of a primed base.
    """
    for base in sorted(dict.fromkeys(chunk.base for chunk in work), key=lambda base: base.derived):
        plan = (plans or {}).get(base)
        groups: dict[int, list[PendingChunk]] = {}  # by the number of tokens in front, which a batch shares
        for chunk in work:
            if chunk.base == base:
                groups.setdefault(0 if plan is None else plan.tokens_in_front(chunk), []).append(chunk)
        for tokens, group in groups.items():
            in_front = tokens + (primer_tokens // COPIES_PER_TOKEN if base.primed else 0)
            for batch in batches_by_length(
                group, lambda chunk: len(chunk.ids), batch_tokens=batch_tokens, extra=extra + in_front
            ):
                origins = () if plan is None else tuple(map(plan.origins, batch))
                yield Batch(base, tuple(tuple(chunk.ids) for chunk in batch), origins, tokens)


def batches_by_length(
    items: Sequence[Item], length: Callable[[Item], int], *, batch_tokens: int, extra: int = 0
) -> Iterator[list[Item]]:
    """Cut a sequence into batches of at most `batch_tokens` tokens, padding included.

    The order is kept roughly: items are sorted by length within groups of about 32 batches. The first items of the
    sequence are done first, and little padding is computed. A longer item is a batch of its own.
    """
    buffered: list[Item] = []
    tokens = 0
    for item in items:
        buffered.append(item)
        tokens += length(item) + extra
        if tokens >= BATCHES_PER_GROUP * batch_tokens:
            yield from _cut(buffered, length, batch_tokens, extra)
            buffered, tokens = [], 0
    yield from _cut(buffered, length, batch_tokens, extra)


def _cut(buffered: list[Item], length: Callable[[Item], int], batch_tokens: int, extra: int) -> Iterator[list[Item]]:
    batch: list[Item] = []
    for item in sorted(buffered, key=length, reverse=True):  # the first item of a batch is its longest
        if batch:
            longest = length(batch[0])
            full = (len(batch) + 1) * (longest + extra) > batch_tokens
            enough = len(batch) * (longest + extra) >= batch_tokens // FULL_ENOUGH
            if full or (enough and length(item) < TOO_SHORT * longest):
                yield batch
                batch = []
        batch.append(item)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The size of a stored batch."""

    chunks: int
    tokens: int
    computed_tokens: int  # with ranking instruction and padding
    size_bytes: int  # of keys and values in the store's format


def store_batch(target: PrefillTarget, batch: Batch, system_prefix: ChunkKV | None) -> BatchResult:
    """Compute a batch behind the result of `system_prefix` and store it."""
    started = time.perf_counter()
    chunks, size = compute_batch(target, batch, system_prefix), 0
    seconds = time.perf_counter() - started
    ms_per_token = 1000 * seconds / batch.tokens
    for ids, chunk in zip(batch.chunks, chunks, strict=True):
        converted = to_store_format(chunk, target.store.kv_dtype)
        target.store.put(target.key(batch.base, ids), converted, saved_ms=ms_per_token * len(ids))
        size += converted.nbytes
    longest = max(map(len, batch.chunks)) + len(instruction_ids(target.lm.tokenizer))
    computed = len(chunks) * longest
    if target.costs is not None and target.lm.device.type == "cpu" and not isinstance(batch.base, ComputedBase):
        before = len(target.prefix_ids) + (len(target.primer) if batch.base.primed else 0)
        target.costs.observe_pass(computed, before + longest / 2, seconds)
    return BatchResult(len(chunks), batch.tokens, computed, size)


def compute_batch(target: PrefillTarget, batch: Batch, system_prefix: ChunkKV | None) -> list[ChunkKV]:
    """Return the keys and values of a batch's chunks, under any base."""
    if isinstance(batch.base, ComputedBase):
        return batch.base.compute(target, batch, system_prefix)
    return prefill_batch(target, batch, system_prefix)


def prefill_batch(
    target: PrefillTarget, batch: Batch, system_prefix: ChunkKV | None, ranker: Ranker | None = None
) -> list[ChunkKV]:
    """Return the keys and values of a batch's chunks behind the text of their base, which is the same for all."""
    base, prefix = batch.base, system_prefix
    if base.primed:
        prefix = target.primed_prefix
    elif not base.after_prefix:
        ids = base.prefix(target.prefix_ids)
        prefix = prefill_chunk(target.lm, ids) if ids else None
    return prefill_chunks(target.lm, batch.chunks, prefix=prefix, ranker=ranker)


def system_prefix(target: PrefillTarget, *, store: bool = True) -> ChunkKV | None:
    """Return the exact keys and values of the system prefix, or None if the prompt has none.

    A quantized copy is not used: chunks would then depend on whether the prefix was stored before them. If it had to be
    computed, it is stored, unless `store` is False.
    """
    if not target.prefix_ids:
        return None
    key = target.key(BLIND, target.prefix_ids)
    stored = target.store.get(key)
    started = time.perf_counter()
    if isinstance(stored, ChunkKV) and stored.kv_dtype == LOSSLESS and check_entry(target.store, key, stored) is None:
        computed = stored
    else:
        computed = prefill_chunk(target.lm, target.prefix_ids)
    if store and not lasting(target.store, [key]):
        elapsed_ms = 1000 * (time.perf_counter() - started)
        target.store.put(key, computed, saved_ms=None if computed is stored else elapsed_ms)
    return computed
