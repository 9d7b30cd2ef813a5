"""Warm a store: prefill every chunk it does not have yet, in batches, the most wanted first."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.ingest.anchors import instruction_ids
from qcfuse_rag.ingest.base import BLIND, FRAMED, Base
from qcfuse_rag.ingest.batch import batches_by_length
from qcfuse_rag.ingest.enrich import Before, enrich_chunks, what_fits
from qcfuse_rag.ingest.prefill import prefill_chunk, prefill_chunks
from qcfuse_rag.ingest.summary import WarmPlan, WarmSummary
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore
from qcfuse_rag.store.key import ChunkKey, hash_ids
from qcfuse_rag.store.layout import entry_bytes
from qcfuse_rag.store.numbers import LOSSLESS

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}

Progress = Callable[[int, int], None]
"""`(done, total) -> None` in tokens, called after every batch."""

Told = Callable[[ChunkKey, Sequence[tuple[int, ...]]], None]
"""`(key, made_of) -> None`: an entry's key, and the token ids of the passages it is made of."""

Stale = Callable[[ChunkKey, Sequence[tuple[int, ...]]], float]
"""`(key, neighbours) -> share`: how many of a passage's present neighbours its enriched entry has not met."""

REFRESH_ABOVE = 0.5
"""Share of neighbours a stored enriched passage may not have met before it is prefilled anew."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A chunk to prefill: its first index among those given, its base and key, and its token ids."""

    index: int
    base: Base
    key: ChunkKey
    ids: array[int]


@dataclass(slots=True)
class SortedOut:
    """A job's chunks by what becomes of them; see `WarmSummary` for what the fields count."""

    work: list[Pending] = field(default_factory=list)
    present: int = 0
    left_out: int = 0
    refreshed: int = 0
    stalest: float = 0.0
    failed: list[tuple[int, str]] = field(default_factory=list)


class WarmJob:
    """Prefills chunks into a store. What is there is left alone, so a job that was killed is simply run again.

    All but enriched chunks that have met too few of their present neighbours: a new document is enriched when it comes,
    those it is a neighbour of when enough has changed for them.

    Memory in use is bounded by one batch: its keys and values, and four bytes for every token of the job.

    Args:
        lm: the model.
        store: where to.
        frame: ids of the prompt's fixed head; stored too.
        chunks: token ids of each chunk; empty ones are passed over.
        bases: under which bases to store each.
        priority: for each chunk how much it is wanted, such as how often it was retrieved; the most wanted are
            prefilled first, and alone if the store has no room for all. In the order given if None.
        neighbours: for each chunk the indices of the chunks it is related to, most related first; needed for enriched
            bases, which also store the framed caches they are made from.
        others: chunks that are not to be stored but may be neighbours; their indices follow those of `chunks`.
        primer: token ids of the text that primed bases are prefilled behind, see `ingest.primer`.
        batch_tokens: most tokens to compute in one pass; 2,048 on a CPU and 16,384 on a GPU if None. 1 computes every
            chunk alone, which makes the stored bytes the same whatever else the job holds.
        told: called before an enriched chunk is written, with the neighbours it is made of.
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
        frame: tuple[int, ...],
        chunks: Iterable[tuple[int, ...]],
        *,
        bases: Iterable[Base],
        priority: Sequence[float] | None = None,
        neighbours: Sequence[Sequence[int]] | None = None,
        others: Iterable[tuple[int, ...]] = (),
        primer: tuple[int, ...] = (),
        batch_tokens: int | None = None,
        told: Told | None = None,
        stale: Stale | None = None,
        refresh_above: float = REFRESH_ABOVE,
    ) -> None:
        self._lm, self._store, self._frame, self._told = lm, store, frame, told
        self._stale, self._refresh_above = stale, refresh_above
        self._primer = primer
        self._primed_head: ChunkKV | None = None
        self._batch_tokens = batch_tokens or BATCH_TOKENS.get(lm.device.type, BATCH_TOKENS["cuda"])
        self._extra = len(instruction_ids(lm.tokenizer))
        chosen, seen = with_first_pass(bases), set()
        self._pending: list[Pending] = []
        self._neighbours = neighbours
        self._ids: list[array[int]] = []
        count = 0
        for index, ids in enumerate(chunks):
            count += 1
            if neighbours is not None:
                self._ids.append(array("i", ids))
            for base in chosen if ids else ():
                key = base.key(lm.fingerprint, frame, ids)
                if key.address not in seen:
                    seen.add(key.address)
                    self._pending.append(Pending(index, base, key, array("i", ids)))
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
        sorted_ = self._sort_out(limit_bytes or self._store.limit_bytes)
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

    def run(self, progress: Progress | None = None) -> WarmSummary:
        """Prefill and store what is missing.

        Raises:
            StoreError: if the store cannot be written.
        """
        started = time.perf_counter()
        sorted_ = self._sort_out(self._store.limit_bytes)
        work = sorted_.work
        head = self._head() if self._frame and self._pending else None
        total = sum(len(one.ids) for one in work)
        warmed = tokens = computed = size = 0
        for batch in self._batches(work):
            begun = time.perf_counter()
            chunks = self._prefill(batch, head)
            taken = sum(len(one.ids) for one in batch)
            saved_ms = 1000 * (time.perf_counter() - begun) / taken
            for one, chunk in zip(batch, chunks, strict=True):
                if one.base.enriched and self._told is not None:
                    self._store.discard(one.key)  # what it is made of is forgotten now
                    self._told(one.key, [tuple(self._ids[index]) for index in self._met(one)])
                self._store.put(one.key, chunk, saved_ms=saved_ms * len(one.ids))
                size += chunk.nbytes
            warmed, tokens = warmed + len(batch), tokens + taken
            computed += len(batch) * (max(len(one.ids) for one in batch) + self._extra)
            if progress is not None:
                progress(tokens, total)
        self._store.flush()
        elapsed = time.perf_counter() - started
        return WarmSummary(
            chunks=len(self._pending),
            warmed=warmed,
            present=sorted_.present,
            left_out=sorted_.left_out,
            tokens=tokens,
            computed_tokens=computed,
            size_bytes=size,
            elapsed_s=elapsed,
            failed=tuple(sorted_.failed),
            refreshed=sorted_.refreshed,
            stalest=sorted_.stalest,
        )

    def _sort_out(self, limit: int | None) -> SortedOut:
        """Tell what to prefill from what is there, has no room, or cannot be stored."""
        found, size = SortedOut(), self._entry_bytes(len(self._frame))
        for one in self._pending:
            length = len(one.ids) + (len(self._frame) if one.base.behind_frame else 0)
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

    def _staleness(self, one: Pending) -> float:
        if self._stale is None or not one.base.enriched:
            return 0.0
        return self._stale(one.key, [tuple(self._ids[index]) for index in self._met(one)])

    def _batches(self, work: list[Pending]) -> Iterable[list[Pending]]:
        for base in sorted(dict.fromkeys(one.base for one in work), key=lambda base: base.enriched):
            own = [one for one in work if one.base is base]
            for before, group in (self._by_what_is_before(own) if base.enriched else {0: own}).items():
                yield from batches_by_length(
                    group, lambda one: len(one.ids), batch_tokens=self._batch_tokens, extra=self._extra + before
                )

    def _by_what_is_before(self, work: list[Pending]) -> dict[int, list[Pending]]:
        """Sort enriched chunks by how much stands before them, those that have the most wanted ones first."""
        groups: dict[int, list[Pending]] = {}
        for one in work:
            groups.setdefault(self._before(one, self._related(one)).length, []).append(one)
        return groups

    def _before(self, one: Pending, related: list[int]) -> Before:
        lengths = [len(self._ids[index]) for index in related]
        return what_fits(len(one.ids) + self._extra, len(self._frame), lengths, self._lm.window.tokens)

    def _prefill(self, batch: list[Pending], head: ChunkKV | None) -> list[ChunkKV]:
        base = batch[0].base
        chunks = [tuple(one.ids) for one in batch]
        if base.enriched:
            first = [] if head is None else [("", head)]
            before = [[*first, *(self._first_pass(index, head) for index in self._met(one))] for one in batch]
            return enrich_chunks(self._lm, chunks, before, self._before(batch[0], self._related(batch[0])).length)
        prefix = head
        if base.primed:
            if self._primed_head is None:
                self._primed_head = prefill_chunk(self._lm, self._frame + self._primer)
            prefix = self._primed_head
        elif not base.behind_frame:
            ids = base.prefix(self._frame)
            prefix = prefill_chunk(self._lm, ids) if ids else None
        return prefill_chunks(self._lm, chunks, prefix=prefix, ranking=base.ranking)

    def _related(self, one: Pending) -> list[int]:
        """Return a passage's neighbours, best first: never its own text, and no text twice."""
        assert self._neighbours is not None
        texts = {tuple(self._ids[index]): index for index in reversed(self._neighbours[one.index])}
        texts.pop(tuple(one.ids), None)
        return [index for index in self._neighbours[one.index] if index in texts.values()]

    def _met(self, one: Pending) -> list[int]:
        """Return those of a passage's neighbours that stand before it."""
        related = self._related(one)
        return related[: self._before(one, related).neighbours]

    def _first_pass(self, index: int, head: ChunkKV | None) -> tuple[str, ChunkKV]:
        """Return a neighbour's `hash_ids` and framed cache: the stored one, else one computed for the moment."""
        ids = tuple(self._ids[index])
        found = self._store.get(FRAMED.key(self._lm.fingerprint, self._frame, ids))
        if isinstance(found, ChunkKV):
            try:
                found.read()
            except (CorruptEntry, OSError):
                pass
            else:
                return hash_ids(ids), found
        return hash_ids(ids), prefill_chunk(self._lm, ids, prefix=head)

    def _measured(self, work: list[Pending]) -> float:
        if not work:
            return 0.0
        batches = list(self._batches(work))
        middle = batches[len(batches) // 2]
        head = self._head(store=False) if self._frame else None
        begun = time.perf_counter()
        self._prefill(middle, head)
        rate = (time.perf_counter() - begun) / sum(len(one.ids) for one in middle)
        return rate * sum(len(one.ids) for one in work)

    def _entry_bytes(self, tokens: int) -> int:
        return entry_bytes(self._lm.shapes, self._lm.dtype, self._store.numbers, tokens)

    def _head(self, *, store: bool = True) -> ChunkKV:
        """Return the exact keys and values of the prompt's fixed head, computing and storing them if need be.

        What a narrow format gave back would not do: chunks would then depend on whether the head was stored before.
        """
        key = BLIND.key(self._lm.fingerprint, self._frame, self._frame)
        found = self._store.get(key)
        if isinstance(found, ChunkKV) and found.numbers == LOSSLESS:
            try:
                found.read()
            except CorruptEntry as error:
                self._store.discard(key, str(error))
            else:
                return found
        begun = time.perf_counter()
        computed = prefill_chunk(self._lm, self._frame)
        if store and key not in self._store:
            self._store.put(key, computed, saved_ms=1000 * (time.perf_counter() - begun))
        return computed


def with_first_pass(bases: Iterable[Base]) -> tuple[Base, ...]:
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
