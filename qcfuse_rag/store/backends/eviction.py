"""Eviction policies: each gives every entry a number, and the entry with the smallest is evicted first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

HALF_LIFE_S = 7 * 24 * 3600.0
"""A use a week ago counts half."""


@dataclass(frozen=True, slots=True)
class EntryUsage:
    """Size and uses of an entry, from which policies compute its worth.

    Attributes:
        size_bytes: its size.
        saved_ms: milliseconds a use saves.
        uses: number of uses, each counting half as much for every week since; storing counts as 1.
        used: unix time of the last use.
    """

    size_bytes: int
    saved_ms: float
    uses: float
    used: float

    def after_uses(self, now: float, count: int = 1) -> EntryUsage:
        """Return the usage after `count` more uses."""
        decayed = self.uses * 2.0 ** (-max(0.0, now - self.used) / HALF_LIFE_S)
        return replace(self, uses=decayed + count, used=max(now, self.used))


def least_recently_used(usage: EntryUsage) -> float:
    """Rank by the last use."""
    return usage.used


def least_frequently_used(usage: EntryUsage) -> float:
    """Rank by uses; older ones count less."""
    return math.log2(usage.uses) + usage.used / HALF_LIFE_S


def least_saving(usage: EntryUsage) -> float:
    """Rank by milliseconds saved per byte, times uses.

    All entries lose worth at the same rate, so the logarithm of today's worth plus the time in half-lives gives the
    same order at any time: the number changes only when an entry is used.
    """
    return least_frequently_used(usage) + math.log2(max(usage.saved_ms, 1e-6) / max(usage.size_bytes, 1))


POLICIES: dict[str, Callable[[EntryUsage], float]] = {
    "cost": least_saving,
    "lru": least_recently_used,
    "lfu": least_frequently_used,
}


def eviction_policy(name: str) -> Callable[[EntryUsage], float]:
    """Return a policy.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no eviction policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]
