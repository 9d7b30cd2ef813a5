"""Counters in memory that a process shares with its children, and that outlive them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np


class Counters:
    """Named counters, a row of them for each worker, who alone changes it.

    Args:
        names: of the counters.
        workers: how many there are.
    """

    def __init__(self, names: Sequence[str], workers: int = 1) -> None:
        self._names = {name: index for index, name in enumerate(names)}
        cells = mmap.mmap(-1, 8 * len(names) * workers)
        self._cells = np.frombuffer(cells, dtype=np.int64).reshape(workers, len(names))

    def add(self, worker: int, name: str, count: int = 1) -> None:
        """Count."""
        self._cells[worker, self._names[name]] += count

    def total(self, *names: str) -> int:
        """Return the sum over all workers."""
        return int(sum(self._cells[:, self._names[name]].sum() for name in names))
