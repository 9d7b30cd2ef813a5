"""Warm a store: prefill every chunk that it does not have yet, in batches, the most wanted first."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from qcfuse_rag.errors import StoreError
from qcfuse_rag.ingestion.batches import BatchResult, compute_batch, plan_batches, store_batch, system_prefix
from qcfuse_rag.ingestion.extension import ComputedBase, EntryPlan, EntryWriter, Related
from qcfuse_rag.ingestion.prefill import Batch, Ids, PendingChunk, PrefillTarget, instruction_ids
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import Base, ChunkKey

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
REFRESH_ABOVE = 0.5
"""An entry of a derived base is made again if it was made without more than this share of its origins."""

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

        The workers' model has to be the driver's. If the driver's store is encrypted, theirs has to be too.
        """
        ...


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """The work that a warming job would do.

    Attributes:
        chunks: number of distinct chunks times bases.
        present: chunks that are stored already.
        to_warm: chunks to prefill.
        tokens: tokens of the chunks to prefill.
        size_bytes: bytes of the chunks to prefill in the store's last tier.
        seconds: estimated time of the prefill, from one measured batch; None if it was not measured.
        left_out: chunks that the store has no room for, the least wanted ones.
        failed: see `WarmSummary`.
        to_refresh: chunks among those to prefill whose stored entries are stale.
        stalest: see `WarmSummary`.
    """

    chunks: int
    present: int
    to_warm: int
    tokens: int
    size_bytes: int
    seconds: float | None
    left_out: int
    failed: tuple[tuple[int, str], ...]
    to_refresh: int = 0
    stalest: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class WarmSummary:
    """The work that a warming job did.

    Attributes:
        chunks: number of distinct chunks times bases.
        warmed: chunks prefilled now.
        present: chunks that were stored already.
        left_out: chunks not prefilled because the store has no room for them beside more wanted ones.
        tokens: tokens prefilled.
        computed_tokens: tokens computed for them, ranking instruction and padding included.
        size_bytes: bytes of keys and values written.
        elapsed_s: seconds.
        failed: `(index, reason)` of chunks that cannot be stored, by their first index in the job; questions over them
            prefill them each time.
        refreshed: chunks among those prefilled whose stored entries were stale: of a derived base, and made without
            most of the passages that they would be made from now.
        stalest: the largest share of such passages that an entry left in the store was not made from.
    """

    chunks: int
    warmed: int
    present: int
    left_out: int
    tokens: int
    computed_tokens: int
    size_bytes: int
    elapsed_s: float
    failed: tuple[tuple[int, str], ...]
    refreshed: int = 0
    stalest: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        rates = {"tokens_per_s": self.tokens / self.elapsed_s if self.elapsed_s else 0.0}
        if self.warmed:
            rates |= {"s_per_chunk": self.elapsed_s / self.warmed, "bytes_per_chunk": self.size_bytes / self.warmed}
        return {**asdict(self), **rates}


@dataclass(slots=True)
class WorkSplit:
    """A job's chunks by what happens to them; `WarmSummary` explains the counts."""

    work: list[PendingChunk] = field(default_factory=list)
    present: int = 0
    left_out: int = 0
    refreshed: int = 0
    stalest: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens to prefill."""
        return sum(len(chunk.ids) for chunk in self.work)


class WarmJob:
    """Prefill chunks into a store. Stored chunks are left alone, so a killed job can simply be run again.

    Exception: a stored chunk of a derived base is prefilled again if most of its origins are new. A new document is
    used at once; the chunks that it is related to are made again when enough has changed for them.

    Memory use is bounded by the keys and values of one batch and four bytes for every token of the job.

    Args:
        target: the model, the store, the system prefix, which is stored too, and the primer.
        chunks: token ids of each chunk; empty chunks are skipped.
        bases: the bases to store each chunk under, with those that they require.
        priority: for each chunk how much it is wanted, such as how often it was retrieved. The most wanted chunks are
            prefilled first, and the others are left out if the store has no room for all. None keeps the order.
        related: what is known of how chunks belong together, for derived bases.
        writer: records what entries of derived bases are made from; None records nothing.
        confirm: called with the keys of the entries that were just written; it removes those that must not stay, such
            as those of a document that was forgotten meanwhile. It may get keys again.
        batch_tokens: most tokens to compute in one pass; None is 2,048 on a CPU and 16,384 on a GPU. 1 computes every
            chunk alone, so that the stored bytes do not depend on the other chunks of the job.

    Raises:
        ValueError: if the number of priorities differs from the number of chunks, a base cannot be made from what is
            known, or a primed base has no primer.
    """

    def __init__(
        self,
        target: PrefillTarget,
        chunks: Iterable[Ids],
        *,
        bases: Iterable[Base],
        priority: Sequence[float] | None = None,
        related: Related | None = None,
        writer: EntryWriter | None = None,
        confirm: Callable[[Sequence[ChunkKey]], object] | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        lm = target.lm
        self._target, self._writer, self._confirm = target, writer, confirm
        self._batch_tokens = batch_tokens or BATCH_TOKENS.get(lm.device.type, BATCH_TOKENS["cuda"])
        self._plans: dict[Base, EntryPlan] = {}
        all_bases, addresses = with_prerequisites(bases), set[str]()
        if any(base.primed for base in all_bases) and not target.primer:
            raise ValueError("a primed base needs the token ids of a primer")
        if any(base.derived for base in all_bases):
            chunks = list(chunks)
        for base in all_bases:
            if isinstance(base, ComputedBase):
                plan = base.plan(target, list(chunks) if base.derived else (), related or Related(), writer)
                self._plans |= {} if plan is None else {base: plan}
        self._pending: list[PendingChunk] = []
        count = 0
        for index, ids in enumerate(chunks):
            count += 1
            for base in all_bases if ids else ():
                key = target.key(base, ids)
                if key.address not in addresses:
                    addresses.add(key.address)
                    self._pending.append(PendingChunk(index, base, key, array("i", ids)))
        if priority is not None:
            if len(priority) != count:
                raise ValueError(f"{len(priority)} priorities for {count} chunks")
            self._pending.sort(key=lambda chunk: -priority[chunk.index])

    def plan(self, *, measure: bool = False, limit_bytes: int | None = None) -> WarmPlan:
        """Return what `run` would do, without storing anything.

        Args:
            measure: prefill one batch to estimate the time.
            limit_bytes: largest size of the store in bytes, instead of its own limit.
        """
        split = self._split(limit_bytes or self._target.store.limit_bytes)
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
        target = self._target
        if workers is not None:
            return self._run(
                progress,
                lambda batches, _: workers.prefill(
                    target.lm, target.prefix_ids, target.primer, batches, encrypted=target.store.encrypted
                ),
                in_order=False,
            )
        return self._run(
            progress,
            lambda batches, prefix: (store_batch(target, batch, prefix) for batch in batches),
            in_order=True,
        )

    def _run(self, progress: Progress | None, compute: Compute, *, in_order: bool) -> WarmSummary:
        started = time.perf_counter()
        split = self._split(self._target.store.limit_bytes)
        prefix = system_prefix(self._target) if self._pending else None
        results: list[BatchResult] = []
        unconfirmed: list[ChunkKey] = []  # entries of derived bases that may be written by now
        written: list[ChunkKey] = []  # all entries that may be written by now
        try:
            for derived in (False, True):  # derived ones are made from the others
                work = [chunk for chunk in split.work if chunk.base.derived is derived]
                batches = (self._begin(batch, unconfirmed, written) for batch in self._plan_batches(work))
                for result in compute(batches, prefix) if work else ():
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
        """Record what the entries of a derived base are made from, before they are computed.

        Ray takes several batches at a time, so it records that many batches ahead.
        """
        keys = [self._target.key(batch.base, ids) for ids in batch.chunks]
        written += keys
        if self._writer is not None:
            for key, origins in zip(keys, batch.origins, strict=False):
                self._writer.begin(key, origins)
                unconfirmed += [key] if any(origins) else []
        return batch

    def _recheck(self, unconfirmed: list[ChunkKey], written: list[ChunkKey]) -> None:
        """Delete entries whose document or origin was deleted during the computation."""
        if self._confirm is not None and written:
            self._confirm(written)
            written.clear()
        while unconfirmed and self._writer is not None:
            self._writer.confirm(unconfirmed[-1])
            unconfirmed.pop()

    def _split(self, limit_bytes: int | None) -> WorkSplit:
        return split_work(self._pending, self._target, limit_bytes, self._plans)

    def _plan_batches(self, work: Sequence[PendingChunk]) -> Iterator[Batch]:
        return plan_batches(
            work,
            batch_tokens=self._batch_tokens,
            extra=len(instruction_ids(self._target.lm.tokenizer)),
            primer_tokens=len(self._target.primer),
            plans=self._plans,
        )

    def _estimate_seconds(self, split: WorkSplit) -> float:
        """Prefill the primer and the middle batch, and return the estimated seconds for all of the work."""
        if not split.work:
            return 0.0
        batches = list(self._plan_batches(split.work))
        middle = batches[len(batches) // 2]
        prefix = system_prefix(self._target, store=False)
        started = time.perf_counter()
        if any(chunk.base.primed for chunk in split.work):
            _ = self._target.primed_prefix  # computed once for all batches
        begun = time.perf_counter()
        compute_batch(self._target, middle, prefix)
        return begun - started + (time.perf_counter() - begun) / middle.tokens * split.tokens


def with_prerequisites(bases: Iterable[Base]) -> tuple[Base, ...]:
    """Return distinct bases and those that they require, derived bases last."""
    distinct = dict.fromkeys(bases)
    required = [other for base in distinct if isinstance(base, ComputedBase) for other in base.requires]
    return tuple(sorted(dict.fromkeys((*distinct, *required)), key=lambda base: base.derived))


def split_work(
    pending: Iterable[PendingChunk],
    target: PrefillTarget,
    limit_bytes: int | None,
    plans: Mapping[Base, EntryPlan],
) -> WorkSplit:
    """Split the chunks of a job: to prefill, stored already, without room in the store, or impossible to store."""
    split, size = WorkSplit(), target.entry_bytes(len(target.prefix_ids))
    context_tokens = target.lm.context_window.tokens
    for chunk in pending:
        length = len(chunk.ids) + (len(target.prefix_ids) if chunk.base.after_prefix else 0)
        length += len(target.primer) if chunk.base.primed else 0
        entry_size = target.entry_bytes(len(chunk.ids))
        size += entry_size
        if chunk.key in target.store:
            plan = plans.get(chunk.base)
            staleness = 0.0 if plan is None else plan.staleness(chunk)
            if staleness > REFRESH_ABOVE:
                split.refreshed += 1
                split.work.append(chunk)
            else:
                split.present += 1
                split.stalest = max(split.stalest, staleness)
        elif length > context_tokens:
            if not chunk.base.primed:  # a primed cache is not made then, and the framed one is used in its place
                reason = (
                    f"a passage of {length:,} tokens with the system prefix exceeds the context window of "
                    f"{context_tokens:,}; split the document into smaller passages"
                )
                split.failed.setdefault(chunk.index, reason)  # once for all bases
            size -= entry_size
        elif limit_bytes is not None and size > limit_bytes:
            split.left_out += 1
            size -= entry_size
        else:
            split.work.append(chunk)
    return split
