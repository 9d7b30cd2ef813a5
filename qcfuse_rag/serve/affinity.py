"""Which replicas are likely to have a request's passages in memory already.

Each passage has two homes among the replicas, by rendezvous hashing (Thaler & Ravishankar 1998), so that a replica that
comes or goes moves only the passages it takes or had. A request's candidates are the two replicas that most of its
passages call home, and the less busy one of them answers: affinity with the power of two choices, as in DualMap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import xxhash

HOMES = 2


def homes(passage: str, replicas: Iterable[str]) -> list[str]:
    """Return the replicas that a passage is at home in, the first one first."""
    ranked = sorted(replicas, key=lambda name: xxhash.xxh64_intdigest(f"{name}\0{passage}".encode()), reverse=True)
    return ranked[:HOMES]


def candidates(passages: Sequence[str], replicas: Sequence[str]) -> list[str]:
    """Return the two replicas to choose from, best first; all if there are no passages to go by.

    Args:
        passages: of a request, in order.
        replicas: names of those that there are.
    """
    if not passages or len(replicas) <= HOMES:
        return list(replicas)
    votes: Counter[str] = Counter()
    for passage in passages:
        first, second = homes(passage, replicas)
        votes[first] += 1
        votes[second] += 1
    # Ties go to the homes of the first passage, the one that was found most relevant.
    lead = {name: -rank for rank, name in enumerate(homes(passages[0], replicas))}
    return sorted(votes, key=lambda name: (votes[name], lead.get(name, -HOMES), name), reverse=True)[:HOMES]
