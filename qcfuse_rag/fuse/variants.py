"""Cache-Craft (arXiv 2502.15734): of the caches a chunk has from different contexts, take the one easiest to mend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from qcfuse_rag.fuse.adapt import Adapted, Place
from qcfuse_rag.fuse.contexts import discordance, stands_behind_head
from qcfuse_rag.fuse.sound import sound
from qcfuse_rag.ingest.context import Slot, filled_slots
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import Miss

NO_IMPACT = 0.5
"""Cache context impact of a chunk that looked at no other: the least there is."""


@dataclass(frozen=True, slots=True)
class ClosestVariant:
    """Place the cache with the smallest fix overhead (CFO): the share of its tokens that ought to be recomputed.

    `CFO = alpha * CCI * (1 - beta')`, where CCI, measured at birth, says how much the chunk looked at those before it;
    and `beta'`, see `prefix_overlap`, how much of that is before it again. What is before it now and was not then does
    not count, as published.

    A cache born behind the head alone has looked at nobody. The formula would call it free to reuse anywhere; but it
    misses all that is before it now. Here it counts as one that shares nothing, with the least impact known of the
    chunk: `alpha * min CCI`, or `alpha / 2` if the chunk was never captured. So it is placed if no captured one shares
    anything that matters.

    Attributes:
        alpha: fitted to a quality target in the paper, per model; above 1 it makes overheads of 1 possible.
        slots: variants to try for each chunk.
        refuse: compute a chunk anew if even its best cache has an overhead of 1.
    """

    alpha: float = 1.0
    slots: int = 5
    refuse: bool = True

    def __post_init__(self) -> None:
        if self.alpha <= 0 or self.slots < 1:
            raise ValueError(f"alpha and slots must be above 0, got {self.alpha} and {self.slots}")

    def adapt(self, place: Place, found: ChunkKV | Miss) -> Adapted | Miss:
        """Choose. What a full prefill of this prompt would give comes first and is exact."""
        prompt, ids = place.prompt, place.span.segment.stored_ids
        before = prompt.ids[: place.span.start]
        if isinstance(found, ChunkKV) and place.base.exact_behind(before, prompt.frame):
            return Adapted(found, exact=True, demand=0.0)
        slots = filled_slots(place.store, "variant", self.slots, place.lm.fingerprint, prompt.frame, ids)
        for overhead, exact, slot in self._ranked(place, slots):
            if overhead >= 1 and self.refuse and (slot is not None or isinstance(found, ChunkKV)):
                return Miss(f"fix overhead {overhead:.2f}: no cache of it is worth mending")
            chunk = found if slot is None else sound(place.store, slot)
            if isinstance(chunk, ChunkKV):
                name, key = (place.base.name, None) if slot is None else (slot.key.base, slot.key)
                note = f"{name}, exact" if exact else f"{name}, fix overhead {overhead:.2f}"
                return Adapted(chunk, exact, overhead, note, key)
        return found if isinstance(found, Miss) else Miss("absent")

    def _ranked(self, place: Place, slots: Sequence[Slot]) -> Iterator[tuple[float, bool, Slot | None]]:
        """Yield `(overhead, exact, slot)`, the easiest first; the cache under the method's base as slot None."""
        known = [impact_of(slot.chunk) for slot in slots]
        rated: list[tuple[float, bool, Slot | None]] = [
            (self._overhead(min(known, default=NO_IMPACT), 0.0), False, None)
        ]
        straight = stands_behind_head(place)
        for slot, impact in zip(slots, known, strict=True):
            exact = straight and slot.context == place.predecessors
            overlap = overlap_of(slot.chunk, place.predecessors)
            rated.append((0.0 if exact else self._overhead(impact, overlap), exact, slot))
        yield from sorted(rated, key=lambda one: (not one[1], one[0]))  # stable: of equals the framed cache is first

    def _overhead(self, impact: float, overlap: float) -> float:
        return min(1.0, max(0.0, self.alpha * impact * (1 - overlap)))


def prefix_overlap(then: Sequence[str], masses: Sequence[float], now: Sequence[str]) -> float:
    """Return Cache-Craft's adjusted prefix overlap `beta' = beta * (1 - gamma)`.

    `beta` is the share of the attention paid to earlier chunks that went to those which are before it now as well, 1 if
    none was paid; `gamma` the share of pairs of common chunks that stand the other way round.

    Args:
        then: hashes of the chunks before it at birth, in order.
        masses: attention paid to each of them.
        now: hashes of those before it in the prompt.

    Returns:
        A fraction; 0 if masses were not measured.
    """
    if len(masses) != len(then) or not then:
        return 0.0
    total = sum(masses)
    beta = sum(mass for one, mass in zip(then, masses, strict=True) if one in now) / total if total > 0 else 1.0
    return beta * (1 - discordance(then, now))


def impact_of(chunk: ChunkKV) -> float:
    """Return the cache context impact (CCI) measured at a chunk's birth, in [0.5, 1]."""
    return next(iter(chunk.facts.get("cci", ())), NO_IMPACT)


def overlap_of(chunk: ChunkKV, now: Sequence[str]) -> float:
    """Return `prefix_overlap` of a chunk's context and a new one."""
    return prefix_overlap(chunk.context or (), chunk.facts.get("inter", ()), now)


def expected_overhead(chunk: ChunkKV, contexts: Sequence[Sequence[str]]) -> float:
    """Return what share of a captured chunk must be mended on average, at alpha 1: Cache-Craft's fragility.

    Args:
        chunk: as captured.
        contexts: those the same text was captured in, which stand for those to come. Its own counts besides, once.
    """
    others = [context for context in contexts if tuple(context) != chunk.context]
    lacking = sum(1 - overlap_of(chunk, context) for context in others)
    return impact_of(chunk) * lacking / (1 + len(others))


def worth_by_mending(
    found: Sequence[Slot], uses: Callable[[Slot], float], context: Sequence[str]
) -> Callable[[Slot], float]:
    """Return a worth by which the slot gives way whose uses saved least: Cache-Craft's eviction within a chunk.

    Between chunks it is the policy `cost` of `store.eviction`, since `ingest.keep` says the same in `saved_ms`.

    Args:
        found: all slots of one chunk.
        uses: how often a slot was used.
        context: of the cache that wants a place.
    """
    contexts = [*(slot.context for slot in found), context]
    return lambda slot: uses(slot) * (1 - expected_overhead(slot.chunk, contexts))
