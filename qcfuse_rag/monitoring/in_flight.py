"""How many requests are being prefilled at this moment, for work that should wait until none is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class InFlight:
    """Counts what is going on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count one while the block runs."""
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is going on, at most so many seconds; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)
