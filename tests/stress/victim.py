"""A process that uses a store until it is killed, and a record of what it was doing that outlives it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from qcfuse_rag import DiskStore, LanguageModel
from qcfuse_rag.store.admin import collect_garbage, fsck, rebuild
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.testing import example_key
from tests.stress.content import chunk_of, wrong_bytes
from tests.stress.processes import Counters, fork, kill
from tests.support.engines import make_engine

NUMBERS, PINNABLE = 24, 4
DOINGS = ("starting", "open", "put", "get", "discard", "quarantine", "pin", "fsck", "gc", "rebuild", "warm", "failed")
WEIGHTS = {"put": 60, "get": 20, "discard": 6, "quarantine": 5, "pin": 5, "fsck": 1, "gc": 2, "rebuild": 1}


class Record:
    """What is being done, how many things were begun, and wrong bytes read; parent and child share it."""

    def __init__(self) -> None:
        self._counters = Counters(("doing", "steps", "wrong"))

    def doing(self, what: str) -> None:
        self._counters.add(0, "doing", DOINGS.index(what) - self._counters.total("doing"))
        self._counters.add(0, "steps")

    def add_wrong(self, count: int) -> None:
        self._counters.add(0, "wrong", count)

    @property
    def last(self) -> str:
        return DOINGS[self._counters.total("doing")]

    @property
    def steps(self) -> int:
        return self._counters.total("steps")

    @property
    def wrong(self) -> int:
        return self._counters.total("wrong")


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
            with DiskStore(folder, limit_bytes, kv_dtype=rng.choice(("model", "int8"))) as store:
                for _ in range(rng.randrange(5, 40)):
                    what = rng.choices(names, weights)[0]
                    record.doing(what)
                    record.add_wrong(step(store, what, rng.randrange(NUMBERS)) or 0)

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


def step(store: DiskStore, what: str, number: int) -> int | None:
    """Do something with a chunk; return how many bytes of it were read wrong, or None if it was not read."""
    key = example_key(number)
    if what == "put":
        store.put(key, chunk_of(number))
    elif what == "get":
        found = store.get(key)
        if not isinstance(found, Miss):
            return wrong_bytes(found, chunk_of(number, found.kv_dtype))
        assert found.reason == "absent", found.reason
    elif what == "discard":
        store.discard(key)
    elif what == "quarantine":
        store.discard(key, reason="to see what happens")
    elif what == "pin":
        store.pin(example_key(number % PINNABLE), pinned=number % 2 == 0)
    elif what == "fsck":
        assert not fsck(store).damaged
    else:
        {"gc": collect_garbage, "rebuild": rebuild}[what](store)
    return None
