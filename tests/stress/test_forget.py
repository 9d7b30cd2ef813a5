"""A document is forgotten while another process warms it and is killed at random: no entry without an owner."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, LanguageModel
from qcfuse_rag.store.admin import fsck
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import ChunkKey
from tests.stress.campaign import Tally, sized
from tests.stress.processes import Counters, fork, kill, wait
from tests.support.engines import make_engine

TEXTS = [f"passage {number} of the report: {'some words ' * 30}" for number in range(12)]
KEPT = [f"passage {number} of another document: {'other words ' * 30}" for number in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forget_while_a_killed_job_warms(tmp_path: Path, llama: LanguageModel) -> None:
    tally, rng = Tally("forget x warm x kill"), random.Random(0)
    folder = tmp_path / "kv"
    warm(llama, folder, KEPT, "kept")
    kept = addresses(folder)
    started = time.monotonic()
    warm(llama, folder, TEXTS, "report")
    seconds = 1.5 * (time.monotonic() - started)
    forget(folder)
    for _ in range(sized(10, 300)):
        tally.trials += 1
        killed = rng.random() < 0.7
        times = Counters(("claimed", "forgotten"))
        warmer = fork(partial(warm_and_record, llama, folder, times))
        time.sleep(rng.uniform(0.0, seconds))
        forgetter = fork(partial(forget_and_record, folder, times))
        if killed:
            time.sleep(rng.uniform(0.0, seconds) * rng.choice((0.1, 1.0)))
        statuses = [kill(warmer) if killed else wait(warmer), wait(forgetter)]
        if not set(statuses) <= {0, -signal.SIGKILL if killed else 0}:
            tally.errors.append(f"processes ended with {statuses}")
        if 0 < times.total("claimed") < times.total("forgotten"):
            tally.note("forgotten after the job had begun")
            if report_is_there(folder):
                tally.errors.append("the document is back, and its job began before it was forgotten")
        check(tally, folder, kept)
        forget(folder)  # a job that began after the forgetting has its document back
        if addresses(folder) != kept:
            tally.errors.append(f"{len(addresses(folder) - kept)} entries stay, {len(kept - addresses(folder))} lost")
    tally.finish()


def check(tally: Tally, folder: Path, kept: set[str]) -> None:
    """Check that every entry has an owner after garbage collection, and that fsck named those that had none."""
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        owned = {address for name in sources.names() for address in sources.addresses(name)}
        stored = {address for address, _ in store.files.entries()}
        left = stored - owned - kept
        tally.reads += len(stored)
        tally.note("trials after which the document is there", "report" in sources.names())
        tally.note("entries without an owner", len(left))
        if set(fsck(store).ownerless) != left:
            tally.errors.append(f"fsck does not name {left - set(fsck(store).ownerless)}")
        sources.garbage.collect_ownerless()
        if {address for address, _ in store.files.entries()} - owned - kept:
            tally.errors.append("an entry without an owner stays")


def warm_and_record(lm: LanguageModel, folder: Path, times: Counters) -> None:
    """Warm the document, and record when the list of documents had it."""
    add = Sources.add

    def recorded(sources: Sources, source: str, keys: Iterable[ChunkKey]) -> None:
        add(sources, source, keys)
        times.add(0, "claimed", time.monotonic_ns())

    Sources.add = recorded  # type: ignore[method-assign] # this process ends soon
    warm(lm, folder, TEXTS, "report")


def forget_and_record(folder: Path, times: Counters) -> None:
    """Forget the document, and record when that began."""
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        times.add(0, "forgotten", time.monotonic_ns())
        sources.forget("report")


def report_is_there(folder: Path) -> bool:
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        return "report" in sources.names()


def forget(folder: Path) -> None:
    with DiskStore(folder) as store, closing(Sources(store)) as sources:
        sources.forget("report")


def warm(lm: LanguageModel, folder: Path, texts: list[str], source: str) -> None:
    with DiskStore(folder) as store:
        engine = make_engine(lm, store)
        engine.warm(texts, sources=[source] * len(texts), batch_tokens=1)
        engine.corpus.close()


def addresses(folder: Path) -> set[str]:
    """Return the addresses of all entries that are stored."""
    with DiskStore(folder) as store:
        return {address for address, _ in store.files.entries()}
