"""Keep hashes of large files and of the weights loaded from them, so that a later start does not read all their bytes.

A hash is kept for the state of the files: path, size, inode, and the times of the last change of content and of
anything (`st_ctime_ns`, which programs cannot set on Linux and macOS). Any other state is hashed anew. So is a file
that was changed within the last `SETTLED_S` seconds, since a second change could have the same times.

A change that leaves all of these is not noticed: bits that a disk loses, writing to the disk below its file system, a
clock that was set back, and on Windows, which has no such second time, a program that sets the first one back. Delete
the folder `hashes` of kept results then, see `models.kept_result`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from huggingface_hub import try_to_load_from_cache

from qcfuse_rag.models.kept_result import KeptResult

SETTLED_S = 2.0
"""Seconds since the last change after which a file's times tell later changes apart; FAT counts in steps of two."""
HASH = re.compile("[0-9a-f]{32}")
INDEX_FILES = "*.index.json"
"""Name the files of weights, which may lie in other folders."""


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file, or of the files in a folder, at one moment.

    Attributes:
        path: the file or folder.
        files: path, size, inode and times of each, in ascending order.
        settled: whether the last change was so long ago that a later one has other times.
    """

    path: Path
    files: tuple[tuple[str, int, int, int, int, int], ...]
    settled: bool

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the state; None if it cannot be read, or a folder's index of weights names files elsewhere."""
        try:
            path, now = path.resolve(strict=True), time.time()
            members = sorted(path.iterdir()) if path.is_dir() else [path]
            if any(set(index.read_text("utf-8")) & {"/", "\\"} for index in members if index.match(INDEX_FILES)):
                return None
            stats = [(member, member.stat()) for member in members if not member.is_dir()]
        except (OSError, ValueError):
            return None
        files = tuple((str(m), s.st_size, s.st_dev, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for m, s in stats)
        latest = max((max(file[-2:]) for file in files), default=0)
        return cls(path, files, latest < (now - SETTLED_S) * 1e9)

    def is_current(self) -> bool:
        """Return whether the files still have this state."""
        now = FileState.read(self.path)
        return now is not None and now.files == self.files


def hash_once(state: FileState | None, settings: dict[str, str], compute: Callable[[], str]) -> str:
    """Return the kept hash of files in a state; without one, compute the hash and keep it.

    Args:
        state: the state of the files before any of them was read; None keeps nothing.
        settings: all else that the hash depends on, ready for JSON.
        compute: returns the hash, 32 hexadecimal digits.
    """
    if state is None or not state.settled or not state.is_current():
        return compute()
    identity = {"files": [list(file) for file in state.files], **settings}
    result = KeptResult("hashes", "hash.json", identity)
    kept = (result.read() or {}).get("hash")
    if isinstance(kept, str) and HASH.fullmatch(kept):
        return kept
    value = compute()
    if state.is_current():
        result.keep(hash=value)
    return value


def snapshot_folder(model: str) -> Path | None:
    """Return the folder of a Hugging Face id in the hub's cache; None if it is not there."""
    try:
        config = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no id
        return None
    return Path(config).parent if isinstance(config, str) else None
