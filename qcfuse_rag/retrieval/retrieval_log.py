"""What was retrieved, and together with what: which passages to warm first, and which to let meet.

No question is kept, not even its hash: a line of the log is hashes of passages.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from qcfuse_rag.models.fingerprint import digest
from qcfuse_rag.store.atomic_write import write_atomically

NAME = "retrievals.jsonl"
MOST_BYTES = 8 << 20
"""Of the file, some 20,000 retrievals of ten passages; it is cut back to the last half of them."""


class RetrievalLog:
    """The last retrievals from a folder's passages, by a hash of each passage's text.

    Lines are appended whole, so several processes may note at once; a line that cannot be read is passed over. Only
    what is noted while another process cuts the file back may be lost.

    Args:
        folder: of the index.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def note(self, texts: Iterable[str]) -> None:
        """Keep one retrieval; a folder that cannot be written goes without."""
        line = json.dumps([digest(text.encode()) for text in texts]) + "\n"
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line.encode())
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if size > MOST_BYTES:
                lines = self._path.read_text("utf-8", errors="replace")[-MOST_BYTES // 2 :].partition("\n")[2]
                write_atomically(self._path, lines, sync=False)

    def counts(self, texts: Iterable[str]) -> list[float]:
        """Return how often each passage was retrieved."""
        counted = Counter(one for retrieval in self._retrievals() for one in retrieval)
        return [float(counted[digest(text.encode())]) for text in texts]

    def retrievals(self, texts: Sequence[str]) -> list[list[int]]:
        """Return past retrievals as indices of these passages; what is not among them is left out."""
        place: dict[str, int] = {}
        for index, text in enumerate(texts):
            place.setdefault(digest(text.encode()), index)  # a passage of two documents goes by its first place
        return [[place[one] for one in retrieval if one in place] for retrieval in self._retrievals()]

    def _retrievals(self) -> list[list[str]]:
        try:
            lines = self._path.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                retrieval = json.loads(line)
            except ValueError:
                continue
            if isinstance(retrieval, list) and all(isinstance(one, str) for one in retrieval):
                found.append(retrieval)
        return found
