"""Run work in forked processes, see how they end, and count in memory that outlives them."""

from __future__ import annotations

import mmap
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence

import numpy as np
import torch

MOST_SECONDS = 120


def fork(work: Callable[[], object]) -> int:
    """Run something in a child process with one thread of torch; return the child's number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)  # threads of the parent do not exist here
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(child: int, most_seconds: float = MOST_SECONDS) -> int:
    """Return the exit status of a child, negative if a signal ended it; one that does not end is killed."""
    deadline = time.monotonic() + most_seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return kill(child)


def kill(child: int) -> int:
    """Kill a child; return its exit status."""
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Counters:
    """Named counters, a row of them for each worker, who alone changes it."""

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
