"""Four processes of eight threads on one folder, whose index is lost, rebuilt and cleared at random moments."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.index_database import INDEX_FAILURES
from qcfuse_rag.store.maintenance import collect_garbage, fsck, rebuild
from tests.stress.campaign import Tally, sized
from tests.stress.content import LARGEST_BYTES, chunk_of, files_of
from tests.stress.shared import Counters
from tests.stress.test_crowd import LIMIT_BYTES, NUMBERS, PROCESSES, THREADS, Worker, observe, start, wait
from tests.support.index_attacks import ATTACKS, keep_older_copy

WEIGHTS = {"put": 80, "get": 40, "discard": 4, "pin": 2, "fsck": 1, "gc": 1, "rebuild": 3, "clear": 1, "lose": 1}
COUNTED = (*WEIGHTS, "read", "wrong", "refused")


class LosingWorker(Worker):
    """Also rebuilds and clears the store and destroys its index. An error that is named is no fault."""

    weights = WEIGHTS

    def _step(self, what: str, number: int, slot: int) -> None:
        try:
            if what == "lose":
                with suppress(OSError):  # somebody else has just done it
                    random.choice(ATTACKS)(self.store.folder / "index")
            elif what in ("gc", "rebuild", "clear"):
                {"gc": collect_garbage, "rebuild": rebuild, "clear": DiskStore.clear}[what](self.store)
            else:
                super()._step(what, number, slot)
        except StoreError:
            self._counters.add(slot, "refused")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_limit_holds_whatever_becomes_of_the_index(tmp_path: Path) -> None:
    tally, seconds = Tally("an index that is lost while 4 processes of 8 threads use it"), sized(6, 120)
    folder, errors = tmp_path / "kv", tmp_path / "errors"
    for number in range(NUMBERS):
        chunk_of(number)  # made once, for all children
    DiskStore(folder, LIMIT_BYTES).close()
    keep_older_copy(folder)
    counters = Counters(COUNTED, PROCESSES * THREADS)
    until = time.monotonic() + seconds
    children = [start(folder, errors, counters, process, until, LosingWorker) for process in range(PROCESSES)]
    try:
        largest, looks = observe(folder, until, *INDEX_FAILURES)
    finally:
        ended = [wait(child) for child in children]
    tally.trials = counters.total(*WEIGHTS)
    tally.reads, tally.wrong_bytes = counters.total("read"), counters.total("wrong")
    tally.errors += errors.read_text().split("\0")[:-1] if errors.exists() else []
    tally.errors += [f"a process ended with {status}" for status in ended if status]
    tally.notes = {what: counters.total(what) for what in (*WEIGHTS, "refused")}
    tally.note("looks at the folder", looks)
    tally.note("most bytes in it", largest)
    tally.note("of", LIMIT_BYTES)
    if largest > LIMIT_BYTES + LARGEST_BYTES:
        tally.errors.append(f"{largest:,} bytes in a folder that may take {LIMIT_BYTES:,}")
    with DiskStore(folder) as store:
        fsck(store)
        report = fsck(store)
        sizes = sum(size for path, size in files_of(folder).items() if path.suffix == ".kv")
        if not report.clean or sizes != store.quota.index.size():
            tally.errors.append(f"files take {sizes:,}, the index says {store.quota.index.size():,}: {report}")
    tally.finish()
