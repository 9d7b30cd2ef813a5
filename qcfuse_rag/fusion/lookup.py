"""Look up a prompt's stored caches: one plan of what to read, which the guard prices and the load reads.

The plan is made from the prompt, the method and the store's index; no entry is read for it. Each segment is then read
once: the first entry of its plan. Only if that is gone or damaged, the next one is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.state import AdaptedChunk, PlacementContext
from qcfuse_rag.prompts.segments import Prompt, Role, Span
from qcfuse_rag.runtime.cost import PrefillEstimate
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.runtime.loading.sources import LateMissError
from qcfuse_rag.store.backends.base import KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import BASES, BLIND, Base, ChunkKey

ABSENT = Miss("absent")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that may be placed.

    Attributes:
        base: what it was prefilled behind.
        key: its address.
        exact: whether full prefill would compute the same at this position.
    """

    base: Base
    key: ChunkKey
    exact: bool


@dataclass(frozen=True, slots=True)
class PlannedLookup:
    """The entries to read for a segment.

    Attributes:
        span: its positions.
        preferred: the base that is best for the segment, stored or not.
        candidates: the entries to read, in this order, until one can be read; at least one.
        stored: whether the store has the first of them.
        near: whether the store's nearest tier has it.
        failure: why an entry before them could not be read, or None.
    """

    span: Span
    preferred: Base
    candidates: tuple[Candidate, ...]
    stored: bool
    near: bool
    failure: str | None = None

    @property
    def is_passage(self) -> bool:
        """Whether the segment is a passage, and not the system prefix."""
        return self.span.segment.role is Role.CHUNK


@dataclass(frozen=True, slots=True, eq=False)
class LookupPlan:
    """The entries to read for a prompt's system prefix and passages, in order.

    Positions before `start` are reused from an earlier request.
    """

    lm: LanguageModel
    store: KVStore
    prompt: Prompt
    method: Method
    start: int
    lookups: tuple[PlannedLookup, ...]
    entries: dict[ChunkKey, ChunkKV | Miss] = field(default_factory=dict)  # read once for all parts of a chunk

    @property
    def far_keys(self) -> list[ChunkKey]:
        """Keys of the entries that only a farther tier has."""
        return [lookup.candidates[0].key for lookup in self.lookups if lookup.stored and not lookup.near]

    @property
    def estimate(self) -> PrefillEstimate:
        """The work of a fused prefill, if what is stored can be read."""
        stored = [lookup for lookup in self.lookups if lookup.stored]
        passages = [lookup for lookup in self.lookups if lookup.is_passage]
        method, prompt_tokens = self.method, len(self.prompt) - self.start
        passage_tokens = sum(len(lookup.span) for lookup in passages)
        prefix_tokens = sum(len(lookup.span) for lookup in stored if not lookup.is_passage)
        inexact_tokens = sum(len(lookup.span) for lookup in stored if not lookup.candidates[0].exact)
        selected_tokens = method.budget.tokens(inexact_tokens) if method.budget is not None else 0
        has_probe = method.probe is not None and selected_tokens > 0
        depth = method.probe.depth(self.lm) if isinstance(method.probe, QuestionProbe) else self.lm.n_layers
        return PrefillEstimate(
            prompt_tokens=prompt_tokens,
            stored_tokens=sum(len(lookup.span) for lookup in stored),
            selected_tokens=selected_tokens,
            probe_rows=prompt_tokens - passage_tokens - prefix_tokens if has_probe else 0,
            probe_share=depth / self.lm.n_layers,
            passages=len({lookup.span.segment.ids_hash for lookup in passages}),
            absent=len({lookup.span.segment.ids_hash for lookup in passages if not lookup.stored}),
            near_tokens=sum(len(lookup.span) for lookup in stored if lookup.near),
            held_tokens=self.start,
        )

    def read(self, lookup: PlannedLookup) -> AdaptedChunk | Miss:
        """Return the chunk to place for a segment, or why there is none."""
        failure, own = lookup.failure, self.method.base
        for candidate in lookup.candidates:
            if candidate.key not in self.entries:
                self.entries[candidate.key] = self.store.get(candidate.key)
            outcome = self._ready(candidate, self._adapted(lookup, candidate, self.entries[candidate.key]))
            if isinstance(outcome, Miss):
                failure = failure or (None if outcome == ABSENT else outcome.reason)
            elif candidate.base is lookup.preferred or (candidate.base is own and failure is None):
                return outcome
            else:
                note = f"{candidate.base.name} instead of {lookup.preferred.name}"
                return replace(outcome, note=note if failure is None else f"{note}: {failure}")
        return self._absence(lookup) if failure is None else Miss(failure)

    def _adapted(self, lookup: PlannedLookup, candidate: Candidate, stored: ChunkKV | Miss) -> AdaptedChunk | Miss:
        if self.method.adapter is not None and lookup.is_passage:
            context = PlacementContext(self.lm, self.store, self.prompt, lookup.span, candidate.base)
            return self.method.adapter.adapt(context, stored)
        return AdaptedChunk(stored, candidate.exact) if isinstance(stored, ChunkKV) else stored

    def _ready(self, candidate: Candidate, outcome: AdaptedChunk | Miss) -> AdaptedChunk | Miss:
        """Read the blocks that a probe reads when it is too late to wait for a store."""
        if isinstance(outcome, Miss):
            return outcome
        key = outcome.key or candidate.key
        try:
            return replace(outcome, chunk=outcome.chunk.ready_to_probe(), key=key)
        except CorruptEntry as error:
            self.store.discard(key, str(error))
            return Miss(str(error))
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            return Miss(f"cannot be read: {error}")

    def _absence(self, lookup: PlannedLookup) -> Miss:
        """Say whether a passage that is not stored under its base is stored under another."""
        tried = {candidate.key for candidate in lookup.candidates}
        context = PlacementContext(self.lm, self.store, self.prompt, lookup.span, lookup.preferred)
        keys = {base.name: context.key(base) for base in BASES.values()}
        others = [name for name, key in keys.items() if lookup.is_passage and key not in tried and key in self.store]
        return Miss(f"absent: stored {', '.join(others)}, not {lookup.preferred.name}") if others else ABSENT


def plan_lookups(
    lm: LanguageModel, store: KVStore, prompt: Prompt, method: Method, start: int = 0, *, priced: bool = True
) -> LookupPlan:
    """Plan what to read for the system prefix and the passages of a prompt.

    The system prefix is stored blind: at position 0 that is exact. Of a passage, the method's own base comes first,
    then those that it falls back to; with `Method.exact_first` those that are exact at the passage's position come
    before all others. Entries that the store does not have are left out. If no guard prices the plan, the store is not
    asked for an entry that is read in any case.
    """
    nearest = store.tiers[0] if len(store.tiers) > 1 else None
    lookups, contains = list[PlannedLookup](), cache(store.__contains__)  # parts of one chunk have one entry
    for span in prompt.spans:
        bases = {Role.SYSTEM_PREFIX: (BLIND,), Role.CHUNK: method.bases}.get(span.segment.role, ())
        if span.start < start or not method.bases or not bases:
            continue
        context = PlacementContext(lm, store, prompt, span, bases[0])
        ordered = [Candidate(base, context.key(base), context.exact_under(base)) for base in bases]
        own, asks = ordered[0], priced or len(ordered) > 1
        if method.exact_first:
            ordered.sort(key=lambda candidate: not candidate.exact)
        lookup = PlannedLookup(span, ordered[0].base, (own,), stored=False, near=False)
        for index, candidate in enumerate(ordered):
            near = nearest is not None and store.address(candidate.key) in nearest
            if near or not asks or contains(candidate.key):
                lookup = replace(lookup, candidates=tuple(ordered[index:]), stored=True, near=near or nearest is None)
                break
        lookups.append(lookup)
    return LookupPlan(lm, store, prompt, method, start, tuple(lookups))


class Lookups:
    """Reads what a plan says, each entry once, however often a prefill is tried."""

    def __init__(self, plan: LookupPlan, wait_budget: WaitBudget) -> None:
        self._plan, self._wait_budget = plan, wait_budget
        self._lookups = {lookup.span.start: lookup for lookup in plan.lookups}
        self._outcomes: dict[int, AdaptedChunk | Miss] = {}

    def outcomes(self) -> list[tuple[Span, AdaptedChunk | Miss]]:
        """Return the chunk to place for each segment, or why there is none."""
        unread = [start for start in self._lookups if start not in self._outcomes]
        if unread:
            plan, lookups = self._plan, [self._lookups[start] for start in unread]
            try:
                # The call refers to no buffer: a store that hangs would keep it alive.
                read = self._wait_budget.call(lambda: [plan.read(lookup) for lookup in lookups])
            except TimeoutError:
                read = [Miss(self._wait_budget.timeout_reason)] * len(unread)
            self._outcomes.update(zip(unread, read, strict=True))
        return [(lookup.span, self._outcomes[start]) for start, lookup in self._lookups.items()]

    def reject(self, late: LateMissError) -> None:
        """Note chunks that could not be read after all; a damaged one is discarded, and the next entry is read."""
        for start, miss in late.misses.items():
            lookup, used = self._lookups[start], self._outcomes[start]
            self._outcomes[start] = miss
            if start not in late.corrupt or not isinstance(used, AdaptedChunk) or used.key is None:
                continue
            self._plan.store.discard(used.key, miss.reason)
            self._plan.entries.pop(used.key, None)
            keys = [candidate.key for candidate in lookup.candidates]
            left = lookup.candidates[keys.index(used.key) + 1 :] if used.key in keys else ()
            if left:
                self._lookups[start] = replace(lookup, candidates=left, failure=lookup.failure or miss.reason)
                del self._outcomes[start]


def rows_if_stored(prompt: Prompt, method: Method, start: int = 0) -> int:
    """Return the rows that a prefill from `start` on computes if every passage is stored; nothing is looked up."""
    if method.base is None:
        return len(prompt) - start
    passage_tokens = sum(len(span) for span in prompt.chunks if span.start >= start)
    selected_tokens = method.budget.tokens(passage_tokens) if method.budget is not None else 0
    return len(prompt) - start - passage_tokens + selected_tokens
