"""Four processes of eight threads on one small folder, watched by the process that started them."""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from qcfuse_rag import DiskStore
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.index_database import identity
from qcfuse_rag.store.maintenance import fsck
from qcfuse_rag.store.testing import example_key
from tests.stress.campaign import Tally
from tests.stress.content import LARGEST_BYTES, chunk_of, files_of, wrong_bytes
from tests.stress.processes import fork, wait
from tests.stress.shared import Counters

PROCESSES, THREADS = 4, 8
NUMBERS = 40
PINNABLE = 4
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
        key, store = example_key(number), self.store
        if operation == "put":
            store.put(key, chunk_of(number))
        elif operation == "get":
            self._read(store, number, slot)
        elif operation == "discard":
            store.discard(key)
        elif operation == "quarantine":
            store.discard(key, reason="to see what happens")
        elif operation == "pin":
            store.pin(example_key(number % PINNABLE), pinned=number % 2 == 0)
        elif operation == "look":
            assert store.stats()[0].size_bytes <= LIMIT_BYTES
            assert isinstance(key in store, bool)  # either may be true, and not for long
            assert all(entry.size_bytes <= LARGEST_BYTES for entry in store.entries())
        elif operation == "fsck":
            report = fsck(store)
            assert not report.damaged, report
        else:
            with DiskStore(self._folder) as another:
                assert another.quota is not None, another.health()
                self._read(another, number, slot)

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

    def _read(self, store: DiskStore, number: int, slot: int) -> None:
        found = store.get(example_key(number))
        if isinstance(found, Miss):
            assert found.reason == "absent", found.reason
        else:
            self.count(slot, "read")
            self.count(slot, "wrong", wrong_bytes(found, chunk_of(number)))


def run_crowd(tally: Tally, folder: Path, worker: type[Worker], seconds: float, *tolerated: type[Exception]) -> None:
    """Let a crowd use a store, watch the folder's size meanwhile, and check the store at the end.

    Args:
        tally: counts what happens.
        folder: of a store that was opened with `LIMIT_BYTES`.
        worker: what the processes do.
        seconds: how long.
        tolerated: exceptions with which a look at the folder may fail.
    """
    for number in range(NUMBERS):
        chunk_of(number)  # made once, for all children
    errors, until = folder.with_name("errors"), time.monotonic() + seconds
    counters = Counters((*worker.weights, "read", "wrong", "refused"), PROCESSES * THREADS)
    with errors.open("a") as log:

        def start(process: int) -> int:
            return fork(lambda: worker(folder, counters, log.fileno(), until).work(process * THREADS))

        children = [start(process) for process in range(PROCESSES)]
        try:
            largest, looks = _watch(folder, until, *tolerated)
        finally:
            statuses = [wait(child) for child in children]
    tally.trials += counters.total(*worker.weights)
    tally.reads += counters.total("read")
    tally.wrong_bytes += counters.total("wrong")
    tally.errors += errors.read_text().split("\0")[:-1]
    tally.errors += [f"a process ended with {status}" for status in statuses if status]
    for what in (*worker.weights, "refused"):
        tally.note(what, counters.total(what))
    tally.note("looks at the folder", looks)
    tally.note("most bytes in it", largest)
    tally.note("of", LIMIT_BYTES)
    if largest > LIMIT_BYTES + LARGEST_BYTES:
        tally.errors.append(f"{largest:,} bytes in a folder that may take {LIMIT_BYTES:,}")


def check_books(tally: Tally, folder: Path) -> None:
    """Check that nothing is wrong with a store, and that its index knows the bytes of its files."""
    with DiskStore(folder) as store:
        report = fsck(store)
        sizes = sum(size for path, size in files_of(folder).items() if path.suffix == ".kv")
        if not report.clean or sizes != store.quota.index.size():
            tally.errors.append(f"files take {sizes:,}, the index says {store.quota.index.size():,}: {report}")


def _watch(folder: Path, until: float, *tolerated: type[Exception]) -> tuple[int, int]:
    """Sum the folder's files again and again; return the largest sum and how many were taken.

    Files move between folders while they are counted, so writers are held up meanwhile; what they wrote stays.
    """
    largest = looks = 0
    with DiskStore(folder) as store:
        while time.monotonic() < until:
            with suppress(*tolerated), store.quota.index.transact():
                index, taken = identity(folder / "index"), sum(files_of(folder).values())
                if identity(folder / "index") == index:  # else nobody was held up, and files were counted twice
                    largest = max(largest, taken)
                    looks += 1
            time.sleep(0.02)
    return largest, looks
