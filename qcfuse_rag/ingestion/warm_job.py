"""Warm a store: prefill every chunk it does not have yet, in batches, the most wanted first."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from qcfuse_rag.errors import StoreError
from qcfuse_rag.ingestion.batch_prefill import Batch, BatchPrefiller, BatchResult
from qcfuse_rag.ingestion.enrichment import NeighbourPrefix, fit_neighbours
from qcfuse_rag.ingestion.length_buckets import batches_by_length
from qcfuse_rag.ingestion.provenance_ledger import ProvenanceLedger
from qcfuse_rag.ingestion.summary import WarmPlan, WarmSummary
from qcfuse_rag.ingestion.token_ranking import instruction_ids
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.header import entry_bytes
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import FRAMED, Base

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}

Progress = Callable[[int, int], None]
"""`(done, total) -> None` in tokens, called after every batch."""

Staleness = Callable[[ChunkKey, Sequence[tuple[int, ...]]], float]
"""`(key, neighbours) -> share`: how many of a passage's present neighbours its enriched entry has not met."""

Compute = Callable[[Iterable[Batch], ChunkKV | None], Iterable[BatchResult]]
"""Computes and stores batches behind the prompt's head, which is stored, and says of each what it took."""

REFRESH_ABOVE = 0.5
"""Share of neighbours a stored enriched passage may not have met before it is prefilled anew."""


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk to prefill: its first index among those given, its base and key, and its token ids."""

    index: int
    base: Base
    key: ChunkKey
    ids: array[int]


@dataclass(slots=True)
class WorkSplit:
    """A job's chunks by what becomes of them; see `WarmSummary` for what the fields count."""

    work: list[PendingChunk] = field(default_factory=list)
    present: int = 0
    left_out: int = 0
    refreshed: int = 0
    stalest: float = 0.0
    failed: list[tuple[int, str]] = field(default_factory=list)


class PrefillWorkers(Protocol):
    """Processes that compute and store batches for a job, such as `cluster.workers.RayWorkers`."""

    def prefill(
        self, lm: LanguageModel, prefix_ids: tuple[int, ...], primer: tuple[int, ...], batches: Iterable[Batch]
    ) -> Iterator[BatchResult]:
        """Compute and store batches; yield the result of each batch as it is done, in any order.

        Args:
            lm: the driver's model; the workers' has to be the same.
            prefix_ids: ids of the prompt's fixed head.
            primer: token ids of the text that primed bases are prefilled behind.
            batches: planned batches.
        """
        ...


class WarmJob:
    """Prefills chunks into a store. What is there is left alone, so a job that was killed is simply run again.

    All but enriched chunks that have met too few of their present neighbours: a new document is enriched when it comes,
    those it is a neighbour of when enough has changed for them.

    Memory in use is bounded by one batch: its keys and values, and four bytes for every token of the job.

    Args:
        lm: the model.
        store: where to.
        prefix_ids: ids of the prompt's fixed head; stored too.
        chunks: token ids of each chunk; empty ones are passed over.
        bases: under which bases to store each.
        priority: for each chunk how much it is wanted, such as how often it was retrieved; the most wanted are
            prefilled first, and alone if the store has no room for all. In the order given if None.
        neighbours: for each chunk the indices of the chunks it is related to, most related first; needed for enriched
            bases, which also store the framed caches they are made from.
        others: chunks that are not to be stored but may be neighbours; their indices follow those of `chunks`.
        primer: token ids of the text that primed bases are prefilled behind, see `ingestion.primer`.
        batch_tokens: most tokens to compute in one pass; 2,048 on a CPU and 16,384 on a GPU if None. 1 computes every
            chunk alone, which makes the stored bytes the same whatever else the job holds.
        ledger: what enriched chunks are made of.
        stale: how far a stored enriched chunk is behind its present neighbours; without it they are left alone.
        refresh_above: an enriched chunk that is further behind is prefilled anew.

    Raises:
        ValueError: if there are not as many priorities or neighbours as chunks, none for an enriched base, or no primer
            for a primed one.
    """

    def __init__(
        self,
        lm: LanguageModel,
        store: KVStore,
        prefix_ids: tuple[int, ...],
        chunks: Iterable[tuple[int, ...]],
        *,
        bases: Iterable[Base],
        priority: Sequence[float] | None = None,
        neighbours: Sequence[Sequence[int]] | None = None,
        others: Iterable[tuple[int, ...]] = (),
        primer: tuple[int, ...] = (),
        batch_tokens: int | None = None,
        ledger: ProvenanceLedger | None = None,
        staleness: Staleness | None = None,
        refresh_above: float = REFRESH_ABOVE,
    ) -> None:
        self._lm, self._store, self._frame, self._ledger = lm, store, prefix_ids, ledger
        self._stale, self._refresh_above = staleness, refresh_above
        self._primer = primer
        self._prefiller = BatchPrefiller(lm, store, prefix_ids, primer)
        self._batch_tokens = batch_tokens or BATCH_TOKENS.get(lm.device.type, BATCH_TOKENS["cuda"])
        self._extra = len(instruction_ids(lm.tokenizer))
        chosen, seen = with_prerequisites(bases), set()
        self._pending: list[PendingChunk] = []
        self._neighbours = neighbours
        self._ids: list[array[int]] = []
        count = 0
        for index, ids in enumerate(chunks):
            count += 1
            if neighbours is not None:
                self._ids.append(array("i", ids))
            for base in chosen if ids else ():
                key = base.key(lm.fingerprint, prefix_ids, ids)
                if key.address not in seen:
                    seen.add(key.address)
                    self._pending.append(PendingChunk(index, base, key, array("i", ids)))
        self._ids += [array("i", ids) for ids in others]
        if priority is not None:
            if len(priority) != count:
                raise ValueError(f"{len(priority)} priorities for {count} chunks")
            self._pending.sort(key=lambda one: -priority[one.index])
        if any(base.primed for base in chosen) and not primer:
            raise ValueError("a primed base needs the token ids of a primer")
        if any(base.enriched for base in chosen) and (neighbours is None or len(neighbours) != count):
            given = "none are given" if neighbours is None else f"they are given for {len(neighbours)}"
            raise ValueError(f"an enriched base needs the neighbours of all {count} chunks, {given}")

    def plan(self, *, measure: bool = False, limit_bytes: int | None = None) -> WarmPlan:
        """Say what `run` would do, without storing anything.

        Args:
            measure: prefill one batch to estimate the time.
            limit_bytes: most bytes the store may take, instead of its own limit.
        """
        sorted_ = self._split_work(limit_bytes or self._store.limit_bytes)
        work = sorted_.work
        tokens = sum(len(one.ids) for one in work)
        return WarmPlan(
            chunks=len(self._pending),
            present=sorted_.present,
            to_warm=len(work),
            tokens=tokens,
            size_bytes=sum(self._entry_bytes(len(one.ids)) for one in work),
            seconds=self._measured(work) if measure else None,
            left_out=sorted_.left_out,
            failed=tuple(sorted_.failed),
            to_refresh=sorted_.refreshed,
            stalest=sorted_.stalest,
        )

    def run(self, progress: Progress | None = None, workers: PrefillWorkers | None = None) -> WarmSummary:
        """Prefill and store what is missing.

        Args:
            progress: called with tokens `(done, total)` after every batch.
            workers: compute and store the batches instead of this process. What they store is the same, bit for bit;
                this process writes the manifest.

        Raises:
            StoreError: if the store cannot be written.
            QCFuseError: if a worker cannot load the model or write the store.
        """
        if workers is not None:
            return self._run(
                progress,
                lambda batches, _: workers.prefill(self._lm, self._frame, self._primer, batches),
                in_order=False,
            )
        return self._run(
            progress, lambda batches, head: (self._prefiller.run(batch, head) for batch in batches), in_order=True
        )

    def _run(self, progress: Progress | None, compute: Compute, *, in_order: bool) -> WarmSummary:
        started = time.perf_counter()
        sorted_ = self._split_work(self._store.limit_bytes)
        head = self._prefiller.head() if self._pending else None
        total = sum(len(one.ids) for one in sorted_.work)
        all_done: list[BatchResult] = []
        begun: list[ChunkKey] = []  # enriched chunks that may be written by now
        try:
            # Enriched chunks are made from framed ones, so these come first.
            for enriched in (False, True):
                own = [one for one in sorted_.work if one.base.enriched is enriched]
                batches = (self._noted(batch, begun) for batch in self._batches(own))
                for done in compute(batches, head) if own else ():
                    all_done.append(done)
                    if in_order:
                        self._recheck_derived(begun)
                    if progress is not None:
                        progress(sum(one.tokens for one in all_done), total)
        except BaseException:
            with suppress(StoreError):  # there is an error already
                self._recheck_derived(begun)
            raise
        self._recheck_derived(begun)
        self._store.flush()
        elapsed = time.perf_counter() - started
        return WarmSummary(
            chunks=len(self._pending),
            warmed=sum(done.chunks for done in all_done),
            present=sorted_.present,
            left_out=sorted_.left_out,
            tokens=sum(done.tokens for done in all_done),
            computed_tokens=sum(done.computed_tokens for done in all_done),
            size_bytes=sum(done.size_bytes for done in all_done),
            elapsed_s=elapsed,
            failed=tuple(sorted_.failed),
            refreshed=sorted_.refreshed,
            stalest=sorted_.stalest,
        )

    def _noted(self, batch: Batch, begun: list[ChunkKey]) -> Batch:
        """Note what enriched chunks will be made of, before they are; until then they are missing.

        On Ray that is as many batches ahead as the driver hands over at a time.
        """
        if batch.base.enriched and self._ledger is not None:
            for ids, met in zip(batch.chunks, batch.met, strict=True):
                key = batch.base.key(self._lm.fingerprint, self._frame, ids)
                self._store.discard(key)  # what it is made of is forgotten now
                self._ledger.made_of(key, met)
                begun += [key] if any(met) else []
        return batch

    def _recheck_derived(self, begun: list[ChunkKey]) -> None:
        """Take enriched chunks back of which a neighbour was forgotten while they were computed."""
        while begun and self._ledger is not None:
            self._ledger.written(begun[-1])
            begun.pop()

    def _split_work(self, limit: int | None) -> WorkSplit:
        """Tell what to prefill from what is there, has no room, or cannot be stored."""
        found, size = WorkSplit(), self._entry_bytes(len(self._frame))
        for one in self._pending:
            length = len(one.ids) + (len(self._frame) if one.base.after_prefix else 0)
            length += len(self._primer) if one.base.primed else 0
            size += (needs := self._entry_bytes(len(one.ids)))
            if one.key in self._store:
                staleness = self._staleness(one)
                if staleness > self._refresh_above:
                    found.refreshed += 1
                    found.work.append(one)
                else:
                    found.present += 1
                    found.stalest = max(found.stalest, staleness)
            elif length > self._lm.window.tokens:
                if not one.base.primed:  # it may be short enough without the primer
                    found.failed.append((one.index, _too_long(length, self._lm.window.tokens)))
                size -= needs
            elif limit is not None and size > limit:
                found.left_out += 1
                size -= needs
            else:
                found.work.append(one)
        return found

    def _staleness(self, one: PendingChunk) -> float:
        if self._stale is None or not one.base.enriched:
            return 0.0
        return self._stale(one.key, self._met(one))

    def _batches(self, work: list[PendingChunk]) -> Iterable[Batch]:
        for base in sorted(dict.fromkeys(one.base for one in work), key=lambda base: base.enriched):
            own = [one for one in work if one.base is base]
            for before, group in (self._by_what_is_before(own) if base.enriched else {0: own}).items():
                for batch in batches_by_length(
                    group, lambda one: len(one.ids), batch_tokens=self._batch_tokens, extra=self._extra + before
                ):
                    met = tuple(self._met(one) for one in batch) if base.enriched else ()
                    yield Batch(base, tuple(tuple(one.ids) for one in batch), met, before)

    def _by_what_is_before(self, work: list[PendingChunk]) -> dict[int, list[PendingChunk]]:
        """Sort enriched chunks by how much stands before them, those that have the most wanted ones first."""
        groups: dict[int, list[PendingChunk]] = {}
        for one in work:
            groups.setdefault(self._before(one, self._related(one)).length, []).append(one)
        return groups

    def _before(self, one: PendingChunk, related: list[int]) -> NeighbourPrefix:
        lengths = [len(self._ids[index]) for index in related]
        return fit_neighbours(len(one.ids) + self._extra, len(self._frame), lengths, self._lm.window.tokens)

    def _related(self, one: PendingChunk) -> list[int]:
        """Return a passage's neighbours, best first: never its own text, and no text twice."""
        assert self._neighbours is not None
        texts = {tuple(self._ids[index]): index for index in reversed(self._neighbours[one.index])}
        texts.pop(tuple(one.ids), None)
        return [index for index in self._neighbours[one.index] if index in texts.values()]

    def _met(self, one: PendingChunk) -> tuple[tuple[int, ...], ...]:
        """Return those of a passage's neighbours that stand before it."""
        related = self._related(one)
        return tuple(tuple(self._ids[index]) for index in related[: self._before(one, related).neighbours])

    def _measured(self, work: list[PendingChunk]) -> float:
        if not work:
            return 0.0
        batches = list(self._batches(work))
        middle = batches[len(batches) // 2]
        head = self._prefiller.head(store=False)
        begun = time.perf_counter()
        self._prefiller.compute(middle, head)
        rate = (time.perf_counter() - begun) / middle.tokens
        return rate * sum(len(one.ids) for one in work)

    def _entry_bytes(self, tokens: int) -> int:
        return entry_bytes(self._lm.shapes, self._lm.dtype, self._store.numbers, tokens)


def with_prerequisites(bases: Iterable[Base]) -> tuple[Base, ...]:
    """Return bases without repetition, those that are made from others after these, which are added if need be."""
    given = dict.fromkeys(bases)
    first = [base for base in given if not base.enriched]
    last = [base for base in given if base.enriched]
    if last and FRAMED not in first:
        first.append(FRAMED)
    return (*first, *last)


def _too_long(length: int, window: int) -> str:
    return (
        f"a passage of {length:,} tokens with the prompt's head exceeds the context window of {window:,}; split the "
        "document into smaller passages"
    )
