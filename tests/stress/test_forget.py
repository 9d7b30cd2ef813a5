"""A document is forgotten while another process warms it and is killed at random: no entry without an owner."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from qcfuse_rag import DiskStore, LanguageModel
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.maintenance import fsck
from tests.stress.campaign import Tally, sized
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
        warmer = fork(lambda: warm(llama, folder, TEXTS, "report"))
        time.sleep(rng.uniform(0.0, seconds))
        forgetter = fork(lambda: forget(folder))
        if killed:
            time.sleep(rng.uniform(0.0, seconds) * rng.choice((0.1, 1.0)))
            os.kill(warmer, signal.SIGKILL)
        check_ended(tally, forgetter)
        check_ended(tally, warmer, killed=killed)
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


def check_ended(tally: Tally, child: int, *, killed: bool = False) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status and not (killed and status == -signal.SIGKILL):
        tally.errors.append(f"a process ended with {status}")


def fork(work: Callable[[], None]) -> int:
    """Run something in another process; return its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        work()
        status = 0
    finally:
        os._exit(status)


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
