"""Destroy a store: overwrite the files that this library wrote with zeros and remove them, and nothing else."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.disk_files import ADDRESS, SHARD
from qcfuse_rag.store.regular_file import is_regular

BLOCK_BYTES = 1 << 20
PART = r"(\.[0-9a-f]{16}\.part)?"
FOLDERS = {
    "objects": re.compile(rf"{SHARD.pattern}/{ADDRESS.pattern}\.kv"),
    "tmp": re.compile(r"[^/]+\.part"),
    "quarantine": re.compile(rf"{ADDRESS.pattern}\.(kv|json)"),
    "models": re.compile(r"[0-9a-f]+\.json"),
    "index": re.compile(r"cache\.db(-wal|-shm|-journal)?"),
    "verdicts": re.compile(rf"[^/]+\.json{PART}"),
}
"""Which files of a store's folders are its own, by their paths inside the folder."""
FILES = re.compile(
    rf"(store\.json|profile\.json|costs-[0-9a-f]+\.json|sources\.db(\.damaged)?(-wal|-shm|-journal)?){PART}"
)
"""Which files beside the folders are the store's own."""


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
        if _is_used(folder):
            raise StoreError(f"a program uses the store in {folder}; stop it, then wipe")
        for name, own in FOLDERS.items():
            _wipe_folder(folder / name, own, report)
        _wipe_files([path for path in folder.iterdir() if FILES.fullmatch(path.name)], report)
        _wipe_files(also, report)
    except OSError as error:
        raise StoreError(f"cannot wipe {folder}: {error}") from error
    return report


def _is_used(folder: Path) -> bool:
    """Return whether a program has the index of a store open: SQLite leaves its log only if nobody else has."""
    path = folder / "index" / "cache.db"
    if path.parent.is_symlink() or not is_regular(path):
        return False
    try:
        with closing(sqlite3.connect(path, timeout=0)) as database:
            database.execute("PRAGMA journal_mode = DELETE").fetchall()
    except sqlite3.Error as error:
        return "locked" in str(error)
    return False


def _wipe_folder(top: Path, own: re.Pattern[str], report: WipeReport) -> None:
    """Wipe the store's own files in one of its folders, and remove the folders that are empty then."""
    if not os.path.lexists(top):
        return
    if not stat.S_ISDIR(top.lstat().st_mode):
        report.left.append(str(top))
        return
    # `fwalk` works on open folders: a folder that is replaced by a link meanwhile is not followed.
    for root, folders, files, descriptor in os.fwalk(top, topdown=False, follow_symlinks=False):
        for name in files:
            path = Path(root, name)
            if own.fullmatch(path.relative_to(top).as_posix()):
                _wipe_file(path, descriptor, report)
            else:
                report.left.append(str(path))
        for name in folders:
            try:
                os.rmdir(name, dir_fd=descriptor)
            except OSError:  # a link, or something was left in it
                if os.path.islink(os.path.join(root, name)):
                    report.left.append(os.path.join(root, name))
    with suppress(OSError):
        top.rmdir()


def _wipe_files(paths: Iterable[Path], report: WipeReport) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _wipe_file(path, descriptor, report)
            finally:
                os.close(descriptor)


def _wipe_file(path: Path, folder: int, report: WipeReport) -> None:
    """Overwrite and remove a file in an open folder, if it is a regular file."""
    if not stat.S_ISREG(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
        report.left.append(str(path))
        return
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with closing(os.fdopen(os.open(path.name, flags, dir_fd=folder), "wb", buffering=0)) as file:
        status = os.fstat(file.fileno())
        alone = status.st_nlink == 1
        if alone and stat.S_ISREG(status.st_mode):
            remaining = status.st_size
            while remaining > 0:
                remaining -= file.write(bytes(min(remaining, BLOCK_BYTES)))
            os.fsync(file.fileno())
    os.unlink(path.name, dir_fd=folder)
    if alone:
        report.files += 1
    else:
        report.linked.append(str(path))
