"""A process that uses a store until it is killed, and a record of what it was doing that outlives it."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qcfuse_rag import DiskStore, LanguageModel
from qcfuse_rag.store.admin import collect_garbage, fsck, rebuild
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.testing import example_key
from tests.stress.content import chunk_of, wrong_bytes
from tests.stress.processes import fork, kill
from tests.support.engines import make_engine

NUMBERS = 24
DOINGS = ("starting", "open", "put", "get", "discard", "quarantine", "pin", "fsck", "gc", "rebuild", "warm", "failed")
WEIGHTS = {"put": 60, "get": 20, "discard": 6, "quarantine": 5, "pin": 5, "fsck": 1, "gc": 2, "rebuild": 1}


class Record:
    """Counters in memory that parent and child share: what is being done, what was done, wrong bytes read."""

    def __init__(self) -> None:
        self._cells = np.frombuffer(mmap.mmap(-1, 4096), dtype=np.int64)

    def doing(self, what: str) -> None:
        """Say what comes next."""
        self._cells[0] = DOINGS.index(what)
        self._cells[1] += 1

    def add_wrong(self, count: int) -> None:
        """Count wrong bytes."""
        self._cells[2] += count

    @property
    def last(self) -> str:
        """What was being done at the end."""
        return DOINGS[self._cells[0]]

    @property
    def steps(self) -> int:
        """How many things were begun."""
        return int(self._cells[1])

    @property
    def wrong(self) -> int:
        """Wrong bytes read."""
        return int(self._cells[2])


def killed_after(seconds: float, work: Callable[[Record], None]) -> Record:
    """Run `work` in a child and kill it with SIGKILL after a while; return what it left on record."""
    record = Record()

    def recorded() -> None:
        try:
            work(record)
        except BaseException:
            record.doing("failed")
            raise

    child = fork(recorded)
    time.sleep(seconds)
    kill(child)
    return record


def churn(folder: Path, limit_bytes: int, seed: int) -> Callable[[Record], None]:
    """Return work that fills a small store without end: every put evicts, formats change, entries are replaced."""

    def work(record: Record) -> None:
        rng = random.Random(seed)
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        while True:
            record.doing("open")
            with DiskStore(folder, limit_bytes, numbers=rng.choice(("model", "int8"))) as store:
                for _ in range(rng.randrange(5, 40)):
                    what = rng.choices(names, weights)[0]
                    record.doing(what)
                    _step(store, what, rng.randrange(NUMBERS), record)

    return work


def warming(lm: LanguageModel, folder: Path, limit_bytes: int, texts: list[str]) -> Callable[[Record], None]:
    """Return work that warms passages into a store that holds only some of them, one half, the other, and again."""

    def work(record: Record) -> None:
        half = len(texts) // 2
        while True:
            record.doing("open")
            with DiskStore(folder, limit_bytes) as store:
                for part in (texts[:half], texts[half:]):
                    record.doing("warm")
                    make_engine(lm, store).warm(part, batch_tokens=1)  # alone, so that the same bytes come of it

    return work


def _step(store: DiskStore, what: str, number: int, record: Record) -> None:
    key = example_key(number)
    if what == "put":
        store.put(key, chunk_of(number))
    elif what == "get":
        found = store.get(key)
        if not isinstance(found, Miss):
            record.add_wrong(wrong_bytes(found, chunk_of(number, found.numbers)))
    elif what == "discard":
        store.discard(key)
    elif what == "quarantine":
        store.discard(key, reason="to see what happens")
    elif what == "pin":
        store.pin(key, pinned=number % 8 == 0)
    else:
        {"fsck": fsck, "gc": collect_garbage, "rebuild": rebuild}[what](store)
