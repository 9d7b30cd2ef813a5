"""Warm a store: prefill every chunk that it does not have yet, in batches, the most wanted first."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from qcfuse_rag.errors import StoreError
from qcfuse_rag.ingestion.batches import BatchResult, compute_batch, plan_batches, store_batch, system_prefix
from qcfuse_rag.ingestion.extension import ComputedBase, EntryPlan, EntryWriter, Related
from qcfuse_rag.ingestion.prefill import Batch, Ids, PendingChunk, PrefillTarget, instruction_ids
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import Miss, get_checked, lasting
from qcfuse_rag.store.key import Base, ChunkKey

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
REFRESH_ABOVE = 0.5
"""An entry of a derived base is made again if it was made without more than this share of its origins."""

Progress = Callable[[int, int], None]
"""`(done, total) -> None` in tokens, called after every batch."""


class PrefillWorkers(Protocol):
    """Processes that compute and store batches for a job, such as `cluster.workers.RayWorkers`."""

    def prefill(
        self, lm: LanguageModel, prefix_ids: Ids, primer: Ids, batches: Iterable[Batch], *, encrypted: bool
    ) -> Iterator[BatchResult]:
        """Compute and store batches; yield the result of each batch when it is done, in any order.

        The workers' model has to be the driver's. If the driver's store is encrypted, theirs has to be too.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmCounts:
    """The counts that a job's plan, `WarmPlan`, and its result, `WarmSummary`, share.

    Attributes:
        chunks: number of distinct chunks times bases.
        present: chunks that are stored already; those that the farthest tier lacks are copied there.
        left_out: chunks not to prefill because the store has no room for them beside more wanted ones.
        tokens: tokens of the chunks to prefill.
        size_bytes: bytes of the keys and values to write.
        failed: `(index, reason)` of chunks that cannot be stored, by their first index in the job; questions over them
            prefill them each time.
        stalest: the largest share of its origins that an entry left in the store was not made from.
    """

    chunks: int
    present: int
    left_out: int
    tokens: int
    size_bytes: int
    failed: tuple[tuple[int, str], ...]
    stalest: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPlan(WarmCounts):
    """The work that a warming job would do; sizes are those of the store's last tier.

    Attributes:
        to_warm: chunks to prefill.
        seconds: estimated time of the prefill, from one measured batch; None if it was not measured.
        to_refresh: chunks among those to prefill whose stored entries are stale.
    """

    to_warm: int
    seconds: float | None
    to_refresh: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSummary(WarmCounts):
    """The work that a warming job did.

    Attributes:
        warmed: chunks prefilled now.
        computed_tokens: tokens computed for them, ranking instruction and padding included.
        elapsed_s: seconds.
        refreshed: chunks among those prefilled whose stored entries were stale: of a derived base, and made without
            most of the passages that they would be made from now.
    """

    warmed: int
    computed_tokens: int
    elapsed_s: float
    refreshed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        rates = {"tokens_per_s": self.tokens / self.elapsed_s if self.elapsed_s else 0.0}
        if self.warmed:
            rates |= {"s_per_chunk": self.elapsed_s / self.warmed, "bytes_per_chunk": self.size_bytes / self.warmed}
        return {**asdict(self), **rates}


@dataclass(slots=True)
class WorkSplit:
    """A job's chunks by what happens to them; `WarmCounts` explains the counts."""

    work: list[PendingChunk] = field(default_factory=list)
    present: int = 0
    nearer: list[PendingChunk] = field(default_factory=list)  # those present that the farthest tier lacks
    left_out: int = 0
    refreshed: int = 0
    stalest: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens to prefill."""
        return sum(len(chunk.ids) for chunk in self.work)

    def counts(self, chunks: int) -> dict[str, Any]:
        """Return what `WarmCounts` has of a job of so many chunks, but for tokens and bytes."""
        counts = {"chunks": chunks, "present": self.present, "left_out": self.left_out, "stalest": self.stalest}
        return {**counts, "failed": tuple(self.failed.items())}


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
        self._unconfirmed: list[ChunkKey] = []  # entries of derived bases that may be written by now
        self._written: list[ChunkKey] = []  # all entries that may be written by now
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
        """Return what `run` would do, without storing anything; `limit_bytes` is in place of the store's own limit.

        `measure` prefills one batch to estimate the time.
        """
        split = self._split(limit_bytes or self._target.store.limit_bytes)
        return WarmPlan(
            **split.counts(len(self._pending)),
            to_warm=len(split.work),
            tokens=split.tokens,
            size_bytes=sum(self._target.entry_bytes(len(chunk.ids)) for chunk in split.work),
            seconds=self._estimate_seconds(split) if measure else None,
            to_refresh=split.refreshed,
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
        target, started = self._target, time.perf_counter()
        split = self._split(target.store.limit_bytes)
        self._copy_down(split)
        prefix = system_prefix(target) if self._pending else None
        results: list[BatchResult] = []
        try:
            for derived in (False, True):  # derived ones are made from the others
                work = [chunk for chunk in split.work if chunk.base.derived is derived]
                batches = map(self._begin, self._plan_batches(work))
                computed = (
                    (store_batch(target, batch, prefix) for batch in batches)
                    if workers is None
                    else workers.prefill(
                        target.lm, target.prefix_ids, target.primer, batches, encrypted=target.store.encrypted
                    )
                )
                for result in computed if work else ():
                    results.append(result)
                    if workers is None:  # workers give their results in any order
                        self._recheck()
                    if progress is not None:
                        progress(sum(result.tokens for result in results), split.tokens)
        except BaseException:
            with suppress(StoreError):  # report the first error
                self._recheck()
            raise
        self._recheck()
        return WarmSummary(
            **split.counts(len(self._pending)),
            warmed=sum(result.chunks for result in results),
            tokens=sum(result.tokens for result in results),
            computed_tokens=sum(result.computed_tokens for result in results),
            size_bytes=sum(result.size_bytes for result in results),
            elapsed_s=time.perf_counter() - started,
            refreshed=split.refreshed,
        )

    def _begin(self, batch: Batch) -> Batch:
        """Record what the entries of a derived base are made from, before they are computed.

        Ray takes several batches at a time, so it records that many batches ahead.
        """
        keys = [self._target.key(batch.base, ids) for ids in batch.chunks]
        self._written += keys
        if self._writer is not None:
            for key, origins in zip(keys, batch.origins, strict=False):
                self._writer.begin(key, origins)
                self._unconfirmed += [key] if any(origins) else []
        return batch

    def _recheck(self) -> None:
        """Delete entries whose document or origin was deleted during the computation."""
        if self._confirm is not None and self._written:
            self._confirm(self._written)
            self._written.clear()
        while self._unconfirmed and self._writer is not None:
            self._writer.confirm(self._unconfirmed[-1])
            self._unconfirmed.pop()

    def _copy_down(self, split: WorkSplit) -> None:
        """Write to the farthest tier what only a nearer one has; what is damaged there is computed."""
        store = self._target.store
        for chunk in split.nearer:
            found = get_checked(store, chunk.key)
            if isinstance(found, Miss):
                split.present -= 1
                split.work.append(chunk)
            else:
                self._written.append(chunk.key)
                store.put(chunk.key, found)

    def _split(self, limit_bytes: int | None) -> WorkSplit:
        target = self._target
        split, size = WorkSplit(), target.entry_bytes(len(target.prefix_ids))
        context_tokens = target.lm.context_window.tokens
        stored = lasting(target.store, (chunk.key for chunk in self._pending))
        for chunk in self._pending:
            length = len(chunk.ids) + (len(target.prefix_ids) if chunk.base.after_prefix else 0)
            length += len(target.primer) if chunk.base.primed else 0
            entry_size = target.entry_bytes(len(chunk.ids))
            size += entry_size
            fits, lasts = limit_bytes is None or size <= limit_bytes, target.store.address(chunk.key) in stored
            # The record of what a derived entry is made from may be lost with the farthest tier: it is made again.
            if lasts or (fits and not chunk.base.derived and chunk.key in target.store):
                plan = self._plans.get(chunk.base)
                staleness = 0.0 if plan is None else plan.staleness(chunk)
                if staleness > REFRESH_ABOVE:
                    split.refreshed += 1
                    split.work.append(chunk)
                else:
                    split.present += 1
                    split.nearer += [] if lasts else [chunk]
                    split.stalest = max(split.stalest, staleness)
            elif length > context_tokens:
                if not chunk.base.primed:  # a primed cache is not made then, and the framed one is used in its place
                    reason = (
                        f"a passage of {length:,} tokens with the system prefix exceeds the context window of "
                        f"{context_tokens:,}; split the document into smaller passages"
                    )
                    split.failed.setdefault(chunk.index, reason)  # once for all bases
                size -= entry_size
            elif not fits:
                split.left_out += 1
                size -= entry_size
            else:
                split.work.append(chunk)
        return split

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
