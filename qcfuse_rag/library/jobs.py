"""The lock of a library's warming jobs. This module imports quickly, so that a second job is refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from qcfuse_rag.errors import Busy

RECORD_NAME = "warm.json"
"""File of a library with the record of its last warming job; the lock's file is beside it."""


def require_no_other_job(library: Path) -> None:
    """Refuse if another job is warming a library; asked before anything is loaded. Leaves no trace."""
    if (library / f"{RECORD_NAME}.lock").exists():
        with job_lock(library):
            pass


@contextmanager
def job_lock(library: Path) -> Iterator[None]:
    """Hold the lock of a library's warming jobs, since two jobs would overwrite each other's passage index."""
    lock = FileLock(library / f"{RECORD_NAME}.lock", timeout=0, mode=0o600)
    try:
        library.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise Busy(
            f"another job is warming {library}; wait for it, or see `qcfuse warm status --store {library}`"
        ) from error
    except OSError:
        pass  # in a read-only folder the job fails later with a clearer error
    try:
        yield
    finally:
        lock.release()
