"""Warm a store: prefill every chunk that it does not have yet, in batches, the most wanted first."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from qcfuse_rag.errors import StoreError
from qcfuse_rag.ingestion.batch_plan import plan_batches
from qcfuse_rag.ingestion.batch_prefill import Batch, BatchPrefiller, BatchResult
from qcfuse_rag.ingestion.neighbour_table import EnrichmentPlan, NeighbourTable
from qcfuse_rag.ingestion.summary import WarmPlan, WarmSummary
from qcfuse_rag.ingestion.target import Ids, PendingChunk, PrefillTarget
from qcfuse_rag.ingestion.token_ranking import instruction_ids
from qcfuse_rag.ingestion.work_split import WorkSplit, split_work
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import FRAMED, Base

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}

Progress = Callable[[int, int], None]
"""`(done, total) -> None` in tokens, called after every batch."""

Compute = Callable[[Iterable[Batch], ChunkKV | None], Iterable[BatchResult]]
"""`(batches, system_prefix) -> results`: compute and store batches behind the stored system prefix."""


class PrefillWorkers(Protocol):
    """Processes that compute and store batches for a job, such as `cluster.workers.RayWorkers`."""

    def prefill(
        self, lm: LanguageModel, prefix_ids: Ids, primer: Ids, batches: Iterable[Batch], *, encrypted: bool
    ) -> Iterator[BatchResult]:
        """Compute and store batches; yield the result of each batch when it is done, in any order.

        Args:
            lm: the driver's model; the workers' model has to be the same.
            prefix_ids: token ids of the system prefix.
            primer: token ids in front of primed chunks.
            batches: planned batches.
            encrypted: whether the driver's store is encrypted; the workers must not use a plain one then.
        """
        ...


class WarmJob:
    """Prefill chunks into a store. Stored chunks are left alone, so a killed job can simply be run again.

    Exception: a stored enriched chunk is prefilled again if most of its current neighbours are new. A new document is
    enriched at once; the chunks that it is a neighbour of are enriched again when enough has changed for them.

    Memory use is bounded by the keys and values of one batch and four bytes for every token of the job.

    Args:
        target: the model, the store, the system prefix, which is stored too, and the primer.
        chunks: token ids of each chunk; empty chunks are skipped.
        bases: the bases to store each chunk under. An enriched base also stores the framed caches it is made from.
        priority: for each chunk how much it is wanted, such as how often it was retrieved. The most wanted chunks are
            prefilled first, and the others are left out if the store has no room for all. None keeps the order.
        enrichment: the chunks' neighbours; needed for enriched bases.
        confirm: called with the keys of the entries that were just written; it removes those that must not stay, such
            as those of a document that was forgotten meanwhile. It may get keys again.
        batch_tokens: most tokens to compute in one pass; None is 2,048 on a CPU and 16,384 on a GPU. 1 computes every
            chunk alone, so that the stored bytes do not depend on the other chunks of the job.

    Raises:
        ValueError: if the number of priorities or neighbours differs from the number of chunks, an enriched base has
            no neighbours, or a primed base has no primer.
    """

    def __init__(
        self,
        target: PrefillTarget,
        chunks: Iterable[Ids],
        *,
        bases: Iterable[Base],
        priority: Sequence[float] | None = None,
        enrichment: EnrichmentPlan | None = None,
        confirm: Callable[[Sequence[ChunkKey]], object] | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        lm = target.lm
        self._target, self._prefiller = target, BatchPrefiller(target)
        self._batch_tokens = batch_tokens or BATCH_TOKENS.get(lm.device.type, BATCH_TOKENS["cuda"])
        self._instruction_tokens = len(instruction_ids(lm.tokenizer))
        all_bases, addresses = with_prerequisites(bases), set[str]()
        self._pending: list[PendingChunk] = []
        all_ids: list[array[int]] = []
        count = 0
        for index, ids in enumerate(chunks):
            count += 1
            if enrichment is not None:
                all_ids.append(array("i", ids))
            for base in all_bases if ids else ():
                key = target.key(base, ids)
                if key.address not in addresses:
                    addresses.add(key.address)
                    self._pending.append(PendingChunk(index, base, key, array("i", ids)))
        if priority is not None:
            if len(priority) != count:
                raise ValueError(f"{len(priority)} priorities for {count} chunks")
            self._pending.sort(key=lambda chunk: -priority[chunk.index])
        if any(base.primed for base in all_bases) and not target.primer:
            raise ValueError("a primed base needs the token ids of a primer")
        if any(base.enriched for base in all_bases) and (enrichment is None or len(enrichment.neighbours) != count):
            got = 0 if enrichment is None else len(enrichment.neighbours)
            raise ValueError(f"an enriched base needs the neighbours of all {count} chunks, got those of {got}")
        self._table = None if enrichment is None else NeighbourTable(target, all_ids, enrichment)
        self._ledger = None if enrichment is None else enrichment.ledger
        self._confirm = confirm

    def plan(self, *, measure: bool = False, limit_bytes: int | None = None) -> WarmPlan:
        """Return what `run` would do, without storing anything.

        Args:
            measure: prefill one batch to estimate the time.
            limit_bytes: largest size of the store in bytes, instead of its own limit.
        """
        split = self._split_work(limit_bytes or self._target.store.limit_bytes)
        return WarmPlan(
            chunks=len(self._pending),
            present=split.present,
            to_warm=len(split.work),
            tokens=split.tokens,
            size_bytes=sum(self._target.entry_bytes(len(chunk.ids)) for chunk in split.work),
            seconds=self._estimate_seconds(split) if measure else None,
            left_out=split.left_out,
            failed=tuple(split.failed.items()),
            to_refresh=split.refreshed,
            stalest=split.stalest,
        )

    def run(self, progress: Progress | None = None, workers: PrefillWorkers | None = None) -> WarmSummary:
        """Prefill and store the missing chunks; some may still be on their way to the store's farthest tier.

        Args:
            progress: called with tokens `(done, total)` after every batch.
            workers: compute and store the batches instead of this process. They store the same bytes; this process
                writes the manifest.

        Raises:
            StoreError: if the store cannot be written.
            QCFuseError: if a worker cannot load the model or write the store.
        """
        if workers is not None:
            target = self._target
            return self._run(
                progress,
                lambda batches, _: workers.prefill(
                    target.lm, target.prefix_ids, target.primer, batches, encrypted=target.store.encrypted
                ),
                in_order=False,
            )
        return self._run(
            progress,
            lambda batches, system_prefix: (self._prefiller.run(batch, system_prefix) for batch in batches),
            in_order=True,
        )

    def _run(self, progress: Progress | None, compute: Compute, *, in_order: bool) -> WarmSummary:
        started = time.perf_counter()
        split = self._split_work(self._target.store.limit_bytes)
        system_prefix = self._prefiller.system_prefix() if self._pending else None
        results: list[BatchResult] = []
        unconfirmed: list[ChunkKey] = []  # enriched entries that may be written by now
        written: list[ChunkKey] = []  # all entries that may be written by now
        try:
            # Enriched chunks are made from framed ones, so the framed ones come first.
            for enriched in (False, True):
                work = [chunk for chunk in split.work if chunk.base.enriched is enriched]
                batches = (self._begin(batch, unconfirmed, written) for batch in self._plan_batches(work))
                for result in compute(batches, system_prefix) if work else ():
                    results.append(result)
                    if in_order:
                        self._recheck(unconfirmed, written)
                    if progress is not None:
                        progress(sum(result.tokens for result in results), split.tokens)
        except BaseException:
            with suppress(StoreError):  # report the first error
                self._recheck(unconfirmed, written)
            raise
        self._recheck(unconfirmed, written)
        return WarmSummary(
            chunks=len(self._pending),
            warmed=sum(result.chunks for result in results),
            present=split.present,
            left_out=split.left_out,
            tokens=sum(result.tokens for result in results),
            computed_tokens=sum(result.computed_tokens for result in results),
            size_bytes=sum(result.size_bytes for result in results),
            elapsed_s=time.perf_counter() - started,
            failed=tuple(split.failed.items()),
            refreshed=split.refreshed,
            stalest=split.stalest,
        )

    def _begin(self, batch: Batch, unconfirmed: list[ChunkKey], written: list[ChunkKey]) -> Batch:
        """Discard enriched chunks and record what they are made from, before they are computed.

        Ray takes several batches at a time, so it records that many batches ahead.
        """
        written += [self._target.key(batch.base, ids) for ids in batch.chunks]
        if batch.base.enriched and self._ledger is not None:
            for ids, neighbours in zip(batch.chunks, batch.neighbours, strict=True):
                key = self._target.key(batch.base, ids)
                self._target.store.discard(key)  # its old origins are forgotten here
                self._ledger.record_origins(key, neighbours)
                unconfirmed += [key] if any(neighbours) else []
        return batch

    def _recheck(self, unconfirmed: list[ChunkKey], written: list[ChunkKey]) -> None:
        """Delete entries whose document or neighbour was deleted during the computation."""
        if self._confirm is not None and written:
            self._confirm(written)
            written.clear()
        while unconfirmed and self._ledger is not None:
            self._ledger.confirm(unconfirmed[-1])
            unconfirmed.pop()

    def _split_work(self, limit_bytes: int | None) -> WorkSplit:
        return split_work(self._pending, self._target, limit_bytes, self._table)

    def _plan_batches(self, work: Sequence[PendingChunk]) -> Iterator[Batch]:
        return plan_batches(
            work,
            batch_tokens=self._batch_tokens,
            extra=self._instruction_tokens,
            primer_tokens=len(self._target.primer),
            table=self._table,
        )

    def _estimate_seconds(self, split: WorkSplit) -> float:
        """Prefill the primer and the middle batch, and return the estimated seconds for all of the work."""
        if not split.work:
            return 0.0
        batches = list(self._plan_batches(split.work))
        middle = batches[len(batches) // 2]
        system_prefix = self._prefiller.system_prefix(store=False)
        started = time.perf_counter()
        if any(chunk.base.primed for chunk in split.work):
            _ = self._target.primed_prefix  # computed once for all batches
        begun = time.perf_counter()
        self._prefiller.compute(middle, system_prefix)
        return begun - started + (time.perf_counter() - begun) / middle.tokens * split.tokens


def with_prerequisites(bases: Iterable[Base]) -> tuple[Base, ...]:
    """Return distinct bases, with the framed base added in front of enriched bases, which are made from it."""
    distinct = dict.fromkeys(bases)
    independent = [base for base in distinct if not base.enriched]
    enriched = [base for base in distinct if base.enriched]
    if enriched and FRAMED not in independent:
        independent.append(FRAMED)
    return (*independent, *enriched)
