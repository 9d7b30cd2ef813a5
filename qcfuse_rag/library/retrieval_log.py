"""Log past retrievals, which tell what to warm first and which passages are neighbours.

The log never contains questions or their hashes: each line has the hashes of one retrieval's passages.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from qcfuse_rag.atomic_write import write_atomically
from qcfuse_rag.models.fingerprint import digest

FILE_NAME = "retrievals.jsonl"
MAX_BYTES = 8 << 20
"""Size limit of the file, about 20,000 retrievals of ten passages; a larger file is cut to its last half."""


class RetrievalLog:
    """The last retrievals from the index in a folder, as hashes of the passages' texts.

    Lines are appended atomically, so several processes may write at once; unreadable lines are skipped. Only lines
    written while another process shortens the file may be lost.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    def note(self, texts: Iterable[str]) -> None:
        """Append a retrieval; nothing happens if the folder cannot be written."""
        line = json.dumps([digest(text.encode()) for text in texts]) + "\n"
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line.encode())
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if size > MAX_BYTES:
                lines = self._path.read_text("utf-8", errors="replace")[-MAX_BYTES // 2 :].partition("\n")[2]
                write_atomically(self._path, lines, sync=False)

    def keep_only(self, texts: Iterable[str]) -> None:
        """Remove the hashes of all other passages, such as those of forgotten documents.

        Raises:
            OSError: if the file cannot be written.
        """
        kept, retrievals = {digest(text.encode()) for text in texts}, self._retrievals()
        if all(name in kept for retrieval in retrievals for name in retrieval):
            return
        lines = [[name for name in retrieval if name in kept] for retrieval in retrievals]
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in lines if line))

    def counts(self, texts: Iterable[str]) -> list[float]:
        """Return how often each passage was retrieved."""
        counts = Counter(name for retrieval in self._retrievals() for name in retrieval)
        return [float(counts[digest(text.encode())]) for text in texts]

    def retrievals(self, texts: Sequence[str]) -> list[list[int]]:
        """Return past retrievals as indices of these passages, without other passages."""
        indices: dict[str, int] = {}
        for index, text in enumerate(texts):
            indices.setdefault(digest(text.encode()), index)  # a passage of two documents has its first index
        return [[indices[name] for name in retrieval if name in indices] for retrieval in self._retrievals()]

    def _retrievals(self) -> list[list[str]]:
        try:
            lines = self._path.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return []
        retrievals = []
        for line in lines:
            try:
                retrieval = json.loads(line)
            except ValueError:
                continue
            if isinstance(retrieval, list) and all(isinstance(name, str) for name in retrieval):
                retrievals.append(retrieval)
        return retrievals
