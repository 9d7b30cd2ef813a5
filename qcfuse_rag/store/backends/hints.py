"""Which entries will be asked for next, as KVFlow knows of its workflows (arXiv 2507.07400): they go last.

A policy of `store.backends.eviction` looks back; a hint looks ahead. A store that gives up entries asks the hints first: what
nobody expects goes by the policy, then what was expected and did not come, then what is expected latest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

MAX_HINTS = 4096
OVERDUE_STEPS = 64
"""Steps for which an entry that was expected and did not come is kept in mind."""

EXPECTED = 1.0
"""Urgency above which an entry is still to come; what did not come in time is below."""


class Hints:
    """Predicted steps to the next use of entries. Safe to use from several threads.

    Args:
        most: hints to hold; the least urgent are dropped beyond.
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
        """Expect entries in so many steps; what was said of them before is forgotten.

        Raises:
            ValueError: if the use would be in the past.
        """
        if steps < 1:
            raise ValueError(f"a hint looks at least 1 step ahead, got {steps}")
        with self._lock:
            for address in addresses:
                self._due[address] = self._now + steps
            while len(self._due) > self._most:
                del self._due[min(self._due, key=self._urgency)]

    def used(self, address: str) -> None:
        """Take note that an entry was asked for, whether it was there or not."""
        with self._lock:
            self._due.pop(address, None)

    def advance(self) -> None:
        """Let a step go by."""
        with self._lock:
            self._now += 1
            for address in [one for one, due in self._due.items() if due < self._now - OVERDUE_STEPS]:
                del self._due[address]

    def urgency(self, address: str) -> float:
        """Return a number that is larger the sooner an entry is expected; 0 if nobody expects it."""
        with self._lock:
            return self._urgency(address)

    def _urgency(self, address: str) -> float:
        due = self._due.get(address)
        if due is None:
            return 0.0
        ahead = due - self._now
        return EXPECTED / (1 - ahead) if ahead < 0 else EXPECTED + 1.0 / (1 + ahead)
