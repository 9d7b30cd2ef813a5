"""Four processes of eight threads on one small folder: nobody reads half an entry, nobody takes more than the limit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.maintenance import fsck
from qcfuse_rag.store.testing import example_key
from tests.stress.campaign import Tally, sized
from tests.stress.content import LARGEST_BYTES, chunk_of, files_of, wrong_bytes
from tests.stress.shared import Counters

PROCESSES, THREADS = 4, 8
NUMBERS = 40
PINNABLE = 4
LIMIT_BYTES = 2_500_000
WEIGHTS = {"put": 40, "get": 60, "discard": 4, "quarantine": 2, "pin": 5, "look": 4, "fsck": 1, "reopen": 1}
COUNTED = (*WEIGHTS, "read", "wrong", "error")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_crowd_on_one_folder(tmp_path: Path) -> None:
    tally, seconds = Tally(f"{PROCESSES} processes of {THREADS} threads on one folder"), sized(4, 60)
    folder, errors = tmp_path / "kv", tmp_path / "errors"
    for number in range(NUMBERS):
        chunk_of(number)  # made once, for all children
    DiskStore(folder, LIMIT_BYTES).close()
    counters = Counters(COUNTED, PROCESSES * THREADS)
    children = [start(folder, errors, counters, process, time.monotonic() + seconds) for process in range(PROCESSES)]
    try:
        largest, looks = observe(folder, time.monotonic() + seconds)
    finally:
        ended = [wait(child) for child in children]
    tally.trials = counters.total(*WEIGHTS)
    tally.reads, tally.wrong_bytes = counters.total("read"), counters.total("wrong")
    tally.errors += errors.read_text().split("\0")[:-1] if errors.exists() else []
    tally.errors += [f"a process ended with {status}" for status in ended if status]
    tally.notes = {what: counters.total(what) for what in WEIGHTS}
    tally.note("looks at the folder", looks)
    tally.note("most bytes in it", largest)
    tally.note("of", LIMIT_BYTES)
    if largest > LIMIT_BYTES + LARGEST_BYTES:
        tally.errors.append(f"{largest:,} bytes in a folder that may take {LIMIT_BYTES:,}")
    with DiskStore(folder) as store:
        report = fsck(store)
        if not report.clean:
            tally.errors.append(f"not clean at the end: {report}")
        sizes = sum(size for path, size in files_of(folder).items() if path.suffix == ".kv")
        if sizes != store.quota.index.size():
            tally.errors.append(f"files take {sizes:,}, the index says {store.quota.index.size():,}")
    assert min(tally.notes[what] for what in WEIGHTS) > 0
    tally.finish()


def observe(folder: Path, until: float, *tolerated: type[Exception]) -> tuple[int, int]:
    """Sum the folder's files again and again; return the largest sum and how many were taken.

    Files move between folders while they are counted, so writers are held up meanwhile; what they wrote stays.
    """
    largest = looks = 0
    with DiskStore(folder) as store:
        while time.monotonic() < until:
            with suppress(*tolerated), store.quota.index.transact():
                largest = max(largest, sum(files_of(folder).values()))
                looks += 1
            time.sleep(0.02)
    return largest, looks


def start(
    folder: Path, errors: Path, counters: Counters, process: int, until: float, kind: type[Worker] | None = None
) -> int:
    """Fork a process that works on the folder with its threads until a time; return its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        with errors.open("a") as log:
            worker = (kind or Worker)(folder, counters, log.fileno(), until)
            threads = [
                threading.Thread(target=worker.run, args=(process * THREADS + thread,)) for thread in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            worker.store.close()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(child: int) -> int:
    """Return what a child ended with; one that does not end is killed."""
    for _ in range(1200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


class Worker:
    """What a process does: all that a store can do, in any order."""

    weights = WEIGHTS

    def __init__(self, folder: Path, counters: Counters, log: int, until: float) -> None:
        self._folder, self._counters, self._log, self._until = folder, counters, log, until
        self.store = DiskStore(folder)

    def run(self, slot: int) -> None:
        """Do one thing after the other; whatever goes wrong is written down."""
        rng = random.Random(slot)
        names, weights = list(self.weights), list(self.weights.values())
        while time.monotonic() < self._until:
            what = rng.choices(names, weights)[0]
            try:
                self._step(what, rng.randrange(NUMBERS), slot)
            except Exception:
                os.write(self._log, f"{what}: {traceback.format_exc()}\0".encode())
            self._counters.add(slot, what)

    def _step(self, what: str, number: int, slot: int) -> None:
        key, store = example_key(number), self.store
        if what == "put":
            store.put(key, chunk_of(number))
        elif what == "get":
            self._read(store, number, slot)
        elif what == "discard":
            store.discard(key)
        elif what == "quarantine":
            store.discard(key, reason="to see what happens")
        elif what == "pin":
            store.pin(example_key(number % PINNABLE), pinned=number % 2 == 0)
        elif what == "look":
            assert store.stats()[0].size_bytes <= LIMIT_BYTES
            assert isinstance(key in store, bool)  # either may be true, and not for long
            assert all(entry.size_bytes <= LARGEST_BYTES for entry in store.entries())
        elif what == "fsck":
            report = fsck(store)
            assert not report.damaged, report
        else:
            with DiskStore(self._folder) as another:
                assert another.quota is not None, another.health()
                self._read(another, number, slot)

    def _read(self, store: DiskStore, number: int, slot: int) -> None:
        found = store.get(example_key(number))
        if isinstance(found, Miss):
            assert found.reason == "absent", found.reason
        else:
            self._counters.add(slot, "read")
            self._counters.add(slot, "wrong", wrong_bytes(found, chunk_of(number)))
