"""Compare the context a cache was prefilled in with the context of a prompt.

Both are lists of chunks' hashes. A chunk counts by the attention paid to it at prefill (the fact `inter`, see
`ingestion.chunk_attention`); where that was not measured, all count alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qcfuse_rag.store.provenance import Context
from qcfuse_rag.store.variant_slots import Slot


def attention_mass(slot: Slot) -> tuple[float, ...]:
    """Return the attention paid to each chunk of a slot's context, summed over the slot's tokens."""
    measured = slot.chunk.facts.get("inter", ())
    if len(measured) == len(slot.context) and sum(measured) > 0:
        return tuple(max(0.0, mass) for mass in measured)
    return tuple(slot.chunk.n_tokens / max(1, len(slot.context)) for _ in slot.context)


def context_overlap(slot: Slot, now: Context) -> float:
    """Return the share of a slot's context, by attention, that `now` contains too; 1 for an empty context."""
    masses = attention_mass(slot)
    total = sum(masses)
    shared = sum(mass for chunk, mass in zip(slot.context, masses, strict=True) if chunk in now)
    return shared / total if total > 0 else 1.0


def kendall_distance(then: Sequence[str], now: Sequence[str]) -> float:
    """Return the share of pairs of common chunks whose order differs (Kendall's distance)."""
    common = [chunk for chunk in dict.fromkeys(then) if chunk in now]
    pairs = list(itertools.combinations(common, 2))
    swapped = sum(now.index(first) > now.index(second) for first, second in pairs)
    return swapped / len(pairs) if pairs else 0.0


def context_distance(slot: Slot, now: Context) -> float:
    """Return how far a slot's context is from another, in tokens' worth of attention; 0 for the same context.

    A chunk that is missing from `now` counts by the attention paid to it. A new chunk counts like an average chunk of
    the slot's context. A different order counts in proportion to the pairs swapped.
    """
    masses = attention_mass(slot)
    missing = sum(mass for chunk, mass in zip(slot.context, masses, strict=True) if chunk not in now)
    average = sum(masses) / len(masses) if masses else slot.chunk.n_tokens
    added = sum(chunk not in slot.context for chunk in now) * average
    return missing + added + kendall_distance(slot.context, now) * (sum(masses) - missing)
