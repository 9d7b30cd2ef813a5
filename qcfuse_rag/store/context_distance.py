"""Comparing the context a cache was born in with the one it is wanted in.

Both are lists of chunks' hashes. How much a chunk matters is the attention that was paid to it at birth (the fact
`inter`, see `ingestion.chunk_attention`); where that was not measured, all matter alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qcfuse_rag.store.provenance import Context
from qcfuse_rag.store.variant_slots import Slot


def attention_mass(slot: Slot) -> tuple[float, ...]:
    """Return the attention paid to each chunk of a slot's context, summed over tokens: in tokens' worth."""
    measured = slot.chunk.facts.get("inter", ())
    if len(measured) == len(slot.context) and sum(measured) > 0:
        return tuple(max(0.0, one) for one in measured)
    return tuple(slot.chunk.n_tokens / max(1, len(slot.context)) for _ in slot.context)


def context_overlap(slot: Slot, now: Context) -> float:
    """Return the share of a slot's context that is there now as well, by attention; 1 if it was born behind nothing."""
    paid = attention_mass(slot)
    total = sum(paid)
    there = sum(mass for one, mass in zip(slot.context, paid, strict=True) if one in now)
    return there / total if total > 0 else 1.0


def kendall_distance(then: Sequence[str], now: Sequence[str]) -> float:
    """Return the share of pairs of common chunks that stand the other way round (Kendall's distance)."""
    common = [one for one in dict.fromkeys(then) if one in now]
    pairs = list(itertools.combinations(common, 2))
    turned = sum(now.index(one) > now.index(other) for one, other in pairs)
    return turned / len(pairs) if pairs else 0.0


def context_distance(slot: Slot, now: Context) -> float:
    """Return how far a slot's context is from another, in tokens' worth of attention; 0 for the same one.

    What the chunk looked at and is gone counts as it did; what is new as a chunk of that context did on average; what
    stands in another order in proportion to the pairs turned round.
    """
    paid = attention_mass(slot)
    gone = sum(mass for one, mass in zip(slot.context, paid, strict=True) if one not in now)
    new = sum(one not in slot.context for one in now) * (sum(paid) / len(paid) if paid else slot.chunk.n_tokens)
    return gone + new + kendall_distance(slot.context, now) * (sum(paid) - gone)
