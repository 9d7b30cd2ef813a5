"""Four processes of eight threads on one small folder: nobody reads half an entry, nobody takes more than the limit."""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from pathlib import Path
from typing import ClassVar

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.store.admin import fsck
from qcfuse_rag.store.testing import example_key
from tests.stress.campaign import Tally, sized
from tests.stress.content import LARGEST_BYTES, chunk_of, files_of
from tests.stress.processes import Counters, fork, wait
from tests.stress.victim import step

PROCESSES, THREADS = 4, 8
NUMBERS = 40
LIMIT_BYTES = 2_500_000


class Worker:
    """One of the processes: its threads do everything that a store can do, in random order.

    Attributes:
        weights: by operation, how often it is done.
    """

    weights: ClassVar = {
        "put": 40,
        "get": 60,
        "discard": 4,
        "quarantine": 2,
        "pin": 5,
        "look": 4,
        "fsck": 1,
        "reopen": 1,
    }

    def __init__(self, folder: Path, counters: Counters, log: int, until: float) -> None:
        self._folder, self._counters, self._log, self._until = folder, counters, log, until
        self.store = DiskStore(folder)

    def work(self, first_slot: int) -> None:
        """Let all threads work until the time is over; each counts in a row of its own, from `first_slot` on."""
        threads = [threading.Thread(target=self._run, args=(first_slot + thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.store.close()

    def operate(self, operation: str, number: int, slot: int) -> None:
        """Do one operation on a chunk."""
        if operation == "look":
            assert self.store.stats()[0].size_bytes <= LIMIT_BYTES
            assert isinstance(example_key(number) in self.store, bool)  # either may be true, and not for long
            assert all(entry.size_bytes <= LARGEST_BYTES for entry in self.store.entries())
        elif operation == "reopen":
            with DiskStore(self._folder) as another:
                assert another.quota is not None, another.health()
                self._step(another, "get", number, slot)
        else:
            self._step(self.store, operation, number, slot)

    def _step(self, store: DiskStore, operation: str, number: int, slot: int) -> None:
        wrong = step(store, operation, number)
        if wrong is not None:
            self.count(slot, "read")
            self.count(slot, "wrong", wrong)

    def count(self, slot: int, what: str, count: int = 1) -> None:
        """Count something in the row of a thread."""
        self._counters.add(slot, what, count)

    def _run(self, slot: int) -> None:
        rng = random.Random(slot)
        names, weights = list(self.weights), list(self.weights.values())
        while time.monotonic() < self._until:
            operation = rng.choices(names, weights)[0]
            try:
                self.operate(operation, rng.randrange(NUMBERS), slot)
            except Exception:
                os.write(self._log, f"{operation}: {traceback.format_exc()}\0".encode())
            self.count(slot, operation)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_crowd_on_one_folder(tmp_path: Path) -> None:
    tally, folder = Tally(f"{PROCESSES} processes of {THREADS} threads on one folder"), tmp_path / "kv"
    DiskStore(folder, LIMIT_BYTES).close()
    for number in range(NUMBERS):
        chunk_of(number)  # made once, for all children
    errors, until = tmp_path / "errors", time.monotonic() + sized(4, 60)
    counters = Counters((*Worker.weights, "read", "wrong"), PROCESSES * THREADS)
    with errors.open("a") as log:

        def start(process: int) -> int:
            return fork(lambda: Worker(folder, counters, log.fileno(), until).work(process * THREADS))

        children = [start(process) for process in range(PROCESSES)]
        try:
            largest = most_bytes(folder, until)
        finally:
            statuses = [wait(child) for child in children]
    tally.trials, tally.reads = counters.total(*Worker.weights), counters.total("read")
    tally.wrong_bytes = counters.total("wrong")
    tally.errors += errors.read_text().split("\0")[:-1]
    tally.errors += [f"a process ended with {status}" for status in statuses if status]
    for what in Worker.weights:
        tally.note(what, counters.total(what))
    with DiskStore(folder) as store:
        assert fsck(store).clean
        assert sum(size for path, size in files_of(folder).items() if path.suffix == ".kv") == store.quota.index.size()
    assert largest <= LIMIT_BYTES + LARGEST_BYTES
    assert min(tally.notes.values()) > 0
    tally.finish()


def most_bytes(folder: Path, until: float) -> int:
    """Sum the folder's files again and again, while writers are held up; return the largest sum."""
    largest = 0
    with DiskStore(folder) as store:
        while time.monotonic() < until:
            with store.quota.index.transact():
                largest = max(largest, sum(files_of(folder).values()))
            time.sleep(0.02)
    return largest
