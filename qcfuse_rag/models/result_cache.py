"""Cache results of slow work, such as hashes of large files, so that later processes on this machine do not repeat it.

A result is a small JSON file in `qcfuse-rag` among the assets of huggingface_hub (`HF_ASSETS_CACHE`, by default
`~/.cache/huggingface/assets`), which may be deleted at any time. A result that cannot be read is missing. A result that
cannot be written is computed again by the next process.

A hash is cached for the state of the files: path, size, inode, and the times of the last change of content and of
anything (`st_ctime_ns`, which programs cannot set on Linux and macOS). A change that leaves all of these is not
noticed: bits that a disk loses, a clock that was set back, and on Windows, which has no such second time, a program
that sets the first one back. Delete the folder `hashes` then.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from huggingface_hub import cached_assets_path

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.models.fingerprint import digest

LOG = logging.getLogger(__name__)

SETTLED_S = 2.0
"""Seconds since the last change after which a file's times tell later changes apart; FAT counts in steps of two."""
HASH = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class CachedResult:
    """The place of a result: its kind's folder, its file, and all that it depends on, ready for JSON.

    `field` is the name of the identity in the file.
    """

    folder: str
    file_name: str
    identity: Any
    field: str = "identity"

    def read(self) -> dict[str, Any] | None:
        """Return its fields; None if there is no readable file of this identity."""
        try:
            fields = json.loads(self._path().read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return fields if isinstance(fields, dict) and fields.get(self.field) == self.identity else None

    def write(self, **fields: Any) -> None:
        """Write the fields of a result, ready for JSON."""
        try:
            write_atomically(self._path(), json.dumps({self.field: self.identity, **fields}), sync=False)
        except (OSError, ValueError) as error:  # huggingface_hub raises ValueError for a file in the folder's place
            LOG.info("%s is not cached: %s", self.file_name, error)

    def _path(self) -> Path:
        text = self.identity if isinstance(self.identity, str) else json.dumps(self.identity, sort_keys=True)
        return cached_assets_path("qcfuse-rag", self.folder, digest(text.encode())) / self.file_name


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file, or of the files in a folder: path, size, inode and times of each, in ascending order.

    A settled state was last changed so long ago that a later change has other times.
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
            indices = [member for member in members if member.match("*.index.json")]
            if any(set(index.read_text("utf-8")) & {"/", "\\"} for index in indices):
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
    """Return the cached hash of files, 32 hexadecimal digits; without one, compute and cache it.

    The state is that before any file was read; None caches nothing. `settings` are all else that the hash depends on.
    """
    if state is None or not state.settled or not state.is_current():
        return compute()
    result = CachedResult("hashes", "hash.json", {"files": [list(file) for file in state.files], **settings})
    value = (result.read() or {}).get("hash")
    if isinstance(value, str) and HASH.fullmatch(value):
        return value
    value = compute()
    if state.is_current():
        result.write(hash=value)
    return value
