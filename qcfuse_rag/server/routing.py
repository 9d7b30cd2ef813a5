"""Predict which replicas have a request's passages in memory.

A replica holds the passages of its recent requests, so passages that are retrieved together are cached on one replica.
A passage without requests so far has two home replicas by rendezvous hashing (Thaler & Ravishankar 1998), the same ones
in every routing process; a replica that joins or leaves moves only the passages it gets or had. The two best replicas
are candidates, and the less busy one answers. This is cache affinity with the power of two choices, as in DualMap; a
popular passage has two homes instead of one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import xxhash

CHOICES = 2
REMEMBERED = 2048
"""Passages to remember for each replica; the replica may have dropped some of them."""


def passage_hash(text: str) -> int:
    """Return the hash of a text; invalid Unicode is allowed, because requests are routed before they are refused."""
    return xxhash.xxh64_intdigest(text.encode("utf-8", "surrogatepass"))


def home_replicas(passage: str, replicas: Iterable[str]) -> list[str]:
    """Return the home replicas of a passage, best first."""
    ranked = sorted(replicas, key=lambda name: passage_hash(f"{name}\0{passage}"), reverse=True)
    return ranked[:CHOICES]


class CacheAffinity:
    """Remembers the passages of each replica's recent requests, as seen by one router. Passages are kept as hashes."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._recent: dict[str, OrderedDict[int, None]] = {}

    def choose(self, passages: Sequence[str], replicas: Collection[str]) -> list[str]:
        """Return the two candidate replicas, best first; all replicas if there are no passages.

        Of two or three replicas only the best one is returned: a choice from all of them would have no affinity. The
        most relevant passage is first.
        """
        for stopped in self._recent.keys() - set(replicas):
            del self._recent[stopped]
        if not passages:
            return sorted(replicas)
        hashes = [passage_hash(passage) for passage in passages]
        home_rank = {home: CHOICES - index for index, home in enumerate(home_replicas(passages[0], replicas))}

        def affinity(replica: str) -> tuple[int, int, str]:
            recent = self._recent.get(replica, ())
            return sum(digest in recent for digest in hashes), home_rank.get(replica, 0), replica

        return sorted(replicas, key=affinity, reverse=True)[: min(CHOICES, max(1, len(replicas) // 2))]

    def record(self, passages: Sequence[str], replica: str) -> None:
        """Record which replica answers a request."""
        recent = self._recent.setdefault(replica, OrderedDict())
        for passage in passages:
            digest = passage_hash(passage)
            recent[digest] = None
            recent.move_to_end(digest)
        while len(recent) > self._remembered:
            recent.popitem(last=False)
