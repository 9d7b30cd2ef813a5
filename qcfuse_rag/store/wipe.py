"""Destroy a store: overwrite the files that this library wrote with zeros and remove them, and nothing else."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.files import FILES_BESIDE, FOLDERS

BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class WipeReport:
    """Result of `wipe`.

    Attributes:
        files: number of files that were overwritten and removed.
        linked: paths of files that were removed and not overwritten: they had another name (a hard link).
        left: paths in the store's folders that were left alone: links, and what this library did not write.
    """

    files: int = 0
    linked: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def wipe(folder: Path, also: Iterable[Path] = ()) -> WipeReport:
    """Overwrite every file that this library wrote into a store with zeros, then remove it. Everything else stays.

    Symbolic links are not followed. A file with another name is removed only: its bytes may be another program's.

    Programs that use the store must be stopped first: what they have mapped would turn into zeros. Flash memory,
    journals, snapshots and backups may still have older copies. To be certain that a store can be erased, encrypt it,
    and destroy its secret.

    Args:
        folder: of the store.
        also: more files to wipe.

    Raises:
        StoreError: if there is no store in the folder, a program uses it, or a file cannot be wiped.
    """
    report = WipeReport()
    try:
        if not (folder / "objects").is_dir():
            raise StoreError(f"there is no store in {folder}")
        if _is_used(folder / "index" / "cache.db"):
            raise StoreError(f"a program uses the store in {folder}; stop it, then wipe")
        for name, own in FOLDERS.items():
            top = folder / name
            if top.is_symlink():
                report.left.append(str(top))
                continue
            for root, folders, files in os.walk(top, topdown=False):
                for path in (Path(root, file) for file in files):
                    if own.fullmatch(path.relative_to(top).as_posix()):
                        _wipe_file(path, report)
                    else:
                        report.left.append(str(path))
                report.left += [str(path) for inside in folders if (path := Path(root, inside)).is_symlink()]
                with suppress(OSError):  # something was left in it
                    os.rmdir(root)
        for path in (*(path for path in folder.iterdir() if FILES_BESIDE.fullmatch(path.name)), *also):
            _wipe_file(path, report)
    except OSError as error:
        raise StoreError(f"cannot wipe {folder}: {error}") from error
    return report


def _is_used(database: Path) -> bool:
    """Return whether a program has the index of a store open: SQLite leaves its log only if nobody else has."""
    if database.parent.is_symlink() or database.is_symlink() or not database.is_file():
        return False
    try:
        with closing(sqlite3.connect(database, timeout=0)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE").fetchall()
    except sqlite3.Error as error:
        return "locked" in str(error)
    return False


def _wipe_file(path: Path, report: WipeReport) -> None:
    """Overwrite and remove a file, if it is a regular file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        report.left.append(str(path))
        return
    if status.st_nlink == 1:
        with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb", buffering=0) as file:
            remaining = status.st_size
            while remaining > 0:
                remaining -= file.write(bytes(min(remaining, BLOCK_BYTES)))
            os.fsync(file.fileno())
        report.files += 1
    else:
        report.linked.append(str(path))
    path.unlink()
