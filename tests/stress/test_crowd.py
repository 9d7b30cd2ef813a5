"""Four processes of eight threads on one small folder: nobody reads half an entry, nobody takes more than the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from tests.stress.campaign import Tally, sized
from tests.stress.crowd import LIMIT_BYTES, PROCESSES, THREADS, Worker, check_books, run_crowd


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_crowd_on_one_folder(tmp_path: Path) -> None:
    tally, folder = Tally(f"{PROCESSES} processes of {THREADS} threads on one folder"), tmp_path / "kv"
    DiskStore(folder, LIMIT_BYTES).close()
    run_crowd(tally, folder, Worker, sized(4, 60))
    check_books(tally, folder)
    assert min(tally.notes[operation] for operation in Worker.weights) > 0
    tally.finish()
