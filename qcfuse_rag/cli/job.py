"""The record of a warming job beside its store: what was asked for and how far it is."""

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

from qcfuse_rag.cli.console import OUT, duration, print_json
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.store.atomic_write import write_whole
from qcfuse_rag.store.backends.disk_files import is_gone, place

NAME = "warm.json"
SAVED_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class WarmOptions:
    """What `qcfuse warm run` was given; kept in the job's record, so that `resume` can give it again."""

    paths: tuple[str, ...]
    reader: str
    model: str | None
    embedder: str | None
    base: str | None
    max_tokens: int
    batch_tokens: int | None
    numbers: str | None
    limit_gb: float | None
    tenant: str | None
    encrypt: bool
    device: str | None
    dtype: str | None
    access: str | None = None
    remote: str | None = None
    ray: str | None = None
    workers: int = 2
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    allow_empty: bool = False


@dataclass(slots=True)
class JobRecord:
    """A warming job, as `qcfuse warm status` shows it.

    Attributes:
        folder: of the library.
        arguments: what `qcfuse warm run` was given; `resume` gives them again.
        state: `running`, `finished`, `interrupted` or `failed`.
        pid, host: of the process that runs it.
        started, updated: unix times.
        done_tokens, total_tokens: how far it is, of what the store did not have.
        summary: what a finished job did.
        error: why it failed.
    """

    folder: Path
    arguments: dict[str, Any]
    state: str = "running"
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=place)
    started: float = field(default_factory=time.time)
    updated: float = 0.0
    done_tokens: int = 0
    total_tokens: int = 0
    summary: dict[str, Any] | None = None
    error: str | None = None

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the record of a library's last job.

        Raises:
            QCFuseError: if there is none.
        """
        path = folder / NAME
        try:
            return cls(folder, **json.loads(path.read_text("utf-8")))
        except FileNotFoundError as error:
            raise QCFuseError(f"no warming job in {folder}; start one with `qcfuse warm run`") from error
        except (OSError, ValueError, TypeError) as error:
            raise QCFuseError(f"cannot read {path} ({error}); start the job again with `qcfuse warm run`") from error

    @property
    def begun(self) -> bool:
        """Whether it was ever written."""
        return self.updated > 0

    def save(self) -> None:
        """Write the record; a disk on which that fails stops the job elsewhere and for a better reason."""
        self.updated = time.time()
        with suppress(OSError):
            write_whole(self.folder / NAME, json.dumps(self.to_dict(), indent=2), sync=False)

    def advance(self, done: int, total: int) -> None:
        """Note how far the job is; written at most once a second."""
        self.done_tokens, self.total_tokens = done, total
        if time.time() - self.updated >= SAVED_EVERY_S:
            self.save()

    def finish(self, state: str, *, summary: dict[str, Any] | None = None, error: str | None = None) -> None:
        """Note how the job ended."""
        self.state, self.summary, self.error = state, summary, error
        self.save()

    @property
    def actual_state(self) -> str:
        """The state, or `killed` for a job that says it is running and whose process, on this machine, is gone."""
        return "killed" if self.state == "running" and is_gone(self.host, self.pid) else self.state

    @property
    def tokens_per_s(self) -> float:
        """Tokens prefilled a second so far."""
        return self.done_tokens / max(1e-9, self.updated - self.started)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        del data["folder"]
        return data


@contextmanager
def only_job(library: Path) -> Iterator[None]:
    """Keep other warming jobs out of a library: each would write the index of passages as it found it.

    Raises:
        QCFuseError: if there is one.
    """
    lock = FileLock(library / f"{NAME}.lock", timeout=0, mode=0o600)
    try:
        library.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise QCFuseError(f"another job is warming {library}; wait for it, or see `qcfuse warm status`") from error
    except OSError:
        pass  # a folder that cannot be written ends the job elsewhere and for a better reason
    try:
        yield
    finally:
        lock.release()


def show_status(library: Path, *, as_json: bool) -> None:
    """Say how far a library's last job is.

    Raises:
        QCFuseError: if there was none.
    """
    record = JobRecord.load(library)
    data = {**record.to_dict(), "state": record.actual_state, "tokens_per_s": record.tokens_per_s}
    if as_json:
        print_json(data)
        return
    OUT.print(f"{record.actual_state}: {record.done_tokens:,} of {record.total_tokens:,} tokens", highlight=False)
    if record.actual_state == "running" and record.done_tokens:
        left = (record.total_tokens - record.done_tokens) / record.tokens_per_s
        OUT.print(f"{record.tokens_per_s:,.0f} tokens a second, {duration(left)} left", highlight=False)
    if record.error:
        OUT.print(record.error, highlight=False, markup=False, soft_wrap=True)
    if record.actual_state not in ("running", "finished"):
        command = f"qcfuse warm resume --store {library}"
        OUT.print(f"`{command}` goes on where it stopped", highlight=False, markup=False, soft_wrap=True)
