"""The record of the last warming job of a library: its options, its progress and how it ended."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.cli.console import duration, print_json, print_line
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.library.jobs import RECORD_NAME
from qcfuse_rag.store.backends.disk_files import process_has_ended, process_namespace

SAVE_INTERVAL_S = 1.0


@dataclass(slots=True)
class JobRecord:
    """A warming job of a library, as `qcfuse warm status` shows it; times are Unix times.

    `qcfuse warm resume` uses the arguments again. The state is `running`, `finished`, `interrupted` or `failed`. Tokens
    are those prefilled so far, and all that the store lacked.
    """

    folder: Path
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

    def save(self) -> None:
        """Write the record; a failed write is ignored, since the job then fails elsewhere with a clearer error."""
        self.updated = time.time()
        with suppress(OSError):
            write_atomically(self.folder / RECORD_NAME, json.dumps(self.to_dict(), indent=2), sync=False)

    def advance(self, done: int, total: int) -> None:
        """Update the progress; write it to disk at most once a second."""
        self.done_tokens, self.total_tokens = done, total
        if time.time() - self.updated >= SAVE_INTERVAL_S:
            self.save()

    def finish(self, state: str, *, summary: dict[str, Any] | None = None, error: str | None = None) -> None:
        """Record the final state of the job."""
        self.state, self.summary, self.error = state, summary, error
        self.save()

    @property
    def actual_state(self) -> str:
        """The state; `killed` if the record says `running` but its process on this machine no longer exists."""
        return "killed" if self.state == "running" and process_has_ended(self.host, self.pid) else self.state

    @property
    def tokens_per_s(self) -> float:
        """Average number of tokens prefilled per second."""
        return self.done_tokens / max(1e-9, self.updated - self.started)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-compatible data, without the folder."""
        data = asdict(self)
        del data["folder"]
        return data


def forget_source(library: Path, source: str) -> None:
    """Remove a document's name from the record of a library's last job, so that `resume` does not bring it back."""
    with suppress(QCFuseError, OSError):  # there is no record, or nothing can be written
        record = JobRecord.load(library)
        before = json.dumps(record.to_dict())
        paths = record.arguments.get("paths", [])
        record.arguments["paths"] = [path for path in paths if not _names(path, source)]
        if record.summary is not None:
            unread = record.summary.get("unread", [])
            record.summary["unread"] = [reason for reason in unread if source not in reason]
        if record.error is not None and source in record.error:
            record.error = None
        if json.dumps(record.to_dict()) != before:
            write_atomically(library / RECORD_NAME, json.dumps(record.to_dict(), indent=2))


def _names(path: str, source: str) -> bool:
    """Return whether a recorded path names a document; a folder does not, whatever its name."""
    return path == source or (path.endswith(f"/{source}") and not Path(path).is_dir())


def show_status(library: Path, *, as_json: bool) -> None:
    """Print the progress of a library's last job."""
    record = JobRecord.load(library)
    data = {**record.to_dict(), "state": record.actual_state, "tokens_per_s": record.tokens_per_s}
    if as_json:
        print_json(data)
        return
    print_line(f"{record.actual_state}: {record.done_tokens:,} of {record.total_tokens:,} tokens")
    if record.actual_state == "running" and record.done_tokens:
        seconds_left = (record.total_tokens - record.done_tokens) / record.tokens_per_s
        print_line(f"{record.tokens_per_s:,.0f} tokens per second, {duration(seconds_left)} left")
    if record.error:
        print_line(record.error)
    if record.actual_state not in ("running", "finished"):
        print_line(f"continue the job with `qcfuse warm resume --store {library}`")
