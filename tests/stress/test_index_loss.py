"""Four processes of eight threads on one folder, whose index is lost, rebuilt and cleared at random moments."""

from __future__ import annotations

import random
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.index_database import INDEX_FAILURES
from qcfuse_rag.store.maintenance import collect_garbage, fsck, rebuild
from tests.stress.campaign import Tally, sized
from tests.stress.crowd import LIMIT_BYTES, PROCESSES, THREADS, Worker, check_books, run_crowd
from tests.support import seams
from tests.support.index_attacks import ATTACKS, keep_older_copy

MAINTENANCE = {"gc": collect_garbage, "rebuild": rebuild, "clear": DiskStore.clear}


class LosingWorker(Worker):
    """Also maintains and clears the store and destroys its index. An error with a name is no fault."""

    weights: ClassVar = {
        "put": 80,
        "get": 40,
        "discard": 4,
        "pin": 2,
        "fsck": 1,
        "gc": 1,
        "rebuild": 3,
        "clear": 1,
        "lose": 1,
    }

    def operate(self, operation: str, number: int, slot: int) -> None:
        try:
            if operation == "lose":
                with suppress(OSError, sqlite3.Error):  # another thread has just done it
                    random.choice(ATTACKS)(self.store.folder / "index")
            elif operation in MAINTENANCE:
                MAINTENANCE[operation](self.store)
            else:
                super().operate(operation, number, slot)
        except StoreError:
            self.count(slot, "refused")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_limit_holds_whatever_becomes_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A lock that was lost with its file is waited for until then.
    seams.index_busy_timeout_s(monkeypatch, sized(5, 60))
    tally = Tally(f"an index that is lost while {PROCESSES} processes of {THREADS} threads use it")
    folder = tmp_path / "kv"
    DiskStore(folder, LIMIT_BYTES).close()
    keep_older_copy(folder)
    run_crowd(tally, folder, LosingWorker, sized(6, 120), *INDEX_FAILURES)
    with DiskStore(folder) as store:
        fsck(store)  # the index may have been lost last of all
    check_books(tally, folder)
    tally.finish()
