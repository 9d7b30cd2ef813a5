"""Which replicas are likely to have a request's passages in memory already.

A replica has what it was lately asked about, so passages that are retrieved together gather where one of them went
first. A passage that nobody was asked about has two homes by rendezvous hashing (Thaler & Ravishankar 1998), the same
in every process that routes, and a replica that comes or goes moves only the passages it takes or had. The two best
replicas are candidates and the less busy one answers: affinity with the power of two choices, as in DualMap, so that
what many ask for has two homes and not one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import xxhash

CHOICES = 2
REMEMBERED = 2048
"""Passages remembered of a replica; some of them it will not have any more."""


def hashed(text: str) -> int:
    """Return a number for a text, be it no Unicode either: what cannot be answered has to be routed all the same."""
    return xxhash.xxh64_intdigest(text.encode("utf-8", "surrogatepass"))


def homes(passage: str, replicas: Iterable[str]) -> list[str]:
    """Return the replicas that a passage is at home in, the first one first."""
    ranked = sorted(replicas, key=lambda name: hashed(f"{name}\0{passage}"), reverse=True)
    return ranked[:CHOICES]


class Affinity:
    """What replicas were lately asked about, as one router saw it. Passages are kept as hashes.

    Args:
        remembered: most passages to remember of each replica.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._asked: dict[str, OrderedDict[int, None]] = {}

    def choose(self, passages: Sequence[str], replicas: Collection[str]) -> list[str]:
        """Return the two replicas to choose from, best first; all if there are no passages to go by.

        Of two or three replicas it is the best one: a choice from all of them would be no affinity.

        Args:
            passages: of a request, the most relevant one first.
            replicas: names of those that there are.
        """
        for gone in self._asked.keys() - set(replicas):
            del self._asked[gone]
        if not passages:
            return sorted(replicas)
        names = [hashed(passage) for passage in passages]
        lead = {home: CHOICES - place for place, home in enumerate(homes(passages[0], replicas))}

        def fit(replica: str) -> tuple[int, int, str]:
            asked = self._asked.get(replica, ())
            return sum(name in asked for name in names), lead.get(replica, 0), replica

        return sorted(replicas, key=fit, reverse=True)[: min(CHOICES, max(1, len(replicas) // 2))]

    def note(self, passages: Sequence[str], replica: str) -> None:
        """Note which replica answers a request."""
        asked = self._asked.setdefault(replica, OrderedDict())
        for passage in passages:
            name = hashed(passage)
            asked[name] = None
            asked.move_to_end(name)
        while len(asked) > self._remembered:
            asked.popitem(last=False)
