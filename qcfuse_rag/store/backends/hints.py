"""Hints which entries will be used next, as KVFlow takes from its workflows (arXiv 2507.07400); they are evicted last.

A policy of `store.backends.eviction` looks back; a hint looks ahead. Entries without a hint are evicted first, by the
policy; then those whose expected use did not come; then those that are expected latest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

MAX_HINTS = 4096
OVERDUE_STEPS = 64
"""Steps for which the hint of an entry stays after its expected use did not come."""

EXPECTED = 1.0
"""Urgency above which a use is still expected; below it, it is overdue."""


class Hints:
    """Expected steps to the next use of entries. Safe to use from several threads.

    Args:
        most: most hints to keep; beyond, the least urgent are dropped.
    """

    def __init__(self, most: int = MAX_HINTS) -> None:
        self._most, self._now = most, 0
        self._due: dict[str, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, address: str) -> bool:
        return address in self._due

    def add(self, addresses: Iterable[str], steps: int) -> None:
        """Expect uses of entries in so many steps, replacing earlier hints.

        Raises:
            ValueError: if `steps` is less than 1.
        """
        if steps < 1:
            raise ValueError(f"a hint looks at least 1 step ahead, got {steps}")
        with self._lock:
            for address in addresses:
                self._due[address] = self._now + steps
            while len(self._due) > self._most:
                del self._due[min(self._due, key=self._urgency)]

    def used(self, address: str) -> None:
        """Drop the hint of an entry that was asked for, whether it exists or not."""
        with self._lock:
            self._due.pop(address, None)

    def advance(self) -> None:
        """Advance by one step, dropping hints that are long overdue."""
        with self._lock:
            self._now += 1
            for address in [name for name, due in self._due.items() if due < self._now - OVERDUE_STEPS]:
                del self._due[address]

    def urgency(self, address: str) -> float:
        """Return a number that is larger the sooner an entry is expected; 0 without a hint."""
        with self._lock:
            return self._urgency(address)

    def _urgency(self, address: str) -> float:
        due = self._due.get(address)
        if due is None:
            return 0.0
        steps = due - self._now
        return EXPECTED / (1 - steps) if steps < 0 else EXPECTED + 1.0 / (1 + steps)
