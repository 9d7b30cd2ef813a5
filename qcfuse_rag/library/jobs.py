"""The warming jobs of a library: one at a time, and the record of the last one.

This module imports quickly, so that a second job is refused at once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.errors import Busy, QCFuseError
from qcfuse_rag.store.backends.files import process_has_ended, process_namespace

RECORD_NAME = "warm.json"
"""File of a library with the record of its last warming job; the lock's file is beside it."""

SAVE_INTERVAL_S = 1.0


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


@dataclass(slots=True)
class JobRecord:
    """A warming job of a library, as `qcfuse warm status` shows it; times are Unix times.

    `qcfuse warm resume` uses the arguments again. The state is `running`, `finished`, `interrupted` or `failed`. Tokens
    are those prefilled so far, and all that the store lacked. Without a folder nothing is kept.
    """

    folder: Path | None
    arguments: dict[str, Any]
    state: str = "running"
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=process_namespace)
    started: float = field(default_factory=time.time)
    updated: float = 0.0
    done_tokens: int = 0
    total_tokens: int = 0
    summary: dict[str, Any] | None = None
    error: str | None = None

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the record of a library's last job."""
        path = folder / RECORD_NAME
        try:
            return cls(folder, **json.loads(path.read_text()))
        except FileNotFoundError as error:
            raise QCFuseError(f"there is no warming job in {folder}; start one with `qcfuse warm run`") from error
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise QCFuseError(f"cannot read {path} ({error}); start the job again with `qcfuse warm run`") from error

    @property
    def begun(self) -> bool:
        """Whether this record was ever written to disk."""
        return self.updated > 0

    @property
    def actual_state(self) -> str:
        """The state; `killed` if the record says `running` but its process on this machine no longer exists."""
        return "killed" if self.state == "running" and process_has_ended(self.host, self.pid) else self.state

    @property
    def tokens_per_s(self) -> float:
        """Average number of tokens prefilled per second."""
        return self.done_tokens / max(1e-9, self.updated - self.started)

    def save(self) -> None:
        """Write the record; a failed write is ignored, since the job then fails elsewhere with a clearer error."""
        self.updated = time.time()
        with suppress(OSError):
            self._write(sync=False)

    def advance(self, done: int, total: int) -> None:
        """Update the progress; write it to disk at most once a second."""
        self.done_tokens, self.total_tokens = done, total
        if time.time() - self.updated >= SAVE_INTERVAL_S:
            self.save()

    def finish(self, state: str, *, summary: dict[str, Any] | None = None, error: str | None = None) -> None:
        """Record the final state of the job."""
        self.state, self.summary, self.error = state, summary, error
        self.save()

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-compatible data, without the folder."""
        data = asdict(self)
        del data["folder"]
        return data

    def forget(self, source: str) -> None:
        """Remove a document's name, and write the record if it had one; raise `OSError` if it cannot be written."""
        before = self.to_dict()
        self.arguments["paths"] = [path for path in self.arguments.get("paths", []) if not _names(path, source)]
        if self.summary is not None:
            unread = self.summary.get("unread") or {}
            kept = {
                reason: [p for p in paths if not f"/{source}".endswith(f"/{p}")] for reason, paths in unread.items()
            }
            self.summary["unread"] = {reason: paths for reason, paths in kept.items() if paths}
        if self.error is not None and source in self.error:
            self.error = None
        if self.to_dict() != before:
            self._write(sync=True)

    def _write(self, *, sync: bool) -> None:
        if self.folder is not None:
            write_atomically(self.folder / RECORD_NAME, json.dumps(self.to_dict(), indent=2), sync=sync)


def forget_source(library: Path, source: str) -> None:
    """Remove a document's name from the record of a library's last job, so that `resume` does not bring it back."""
    with suppress(QCFuseError, OSError):  # there is no record, or nothing can be written
        JobRecord.load(library).forget(source)


def _names(path: str, source: str) -> bool:
    """Return whether a recorded path names a document; a folder does not, whatever its name."""
    return path == source or (path.endswith(f"/{source}") and not Path(path).is_dir())
