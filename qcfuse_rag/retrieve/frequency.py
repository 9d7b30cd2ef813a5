"""How often each passage was retrieved: what a warming job does first. No question is kept, not even its hash."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from qcfuse_rag.model.fingerprint import digest

NAME = "retrieved.json"


class RetrievalCounts:
    """Counts retrievals of passages in a folder, by a hash of their text.

    Two processes that count at the same moment may lose a count; a file that cannot be read counts from nothing.

    Args:
        folder: of the index.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        try:
            self._counts: Counter[str] = Counter(json.loads(self._path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            self._counts = Counter()

    def note(self, texts: Iterable[str]) -> None:
        """Count one retrieval of each passage; a folder that cannot be written goes without."""
        self._counts.update(digest(text.encode()) for text in texts)
        part = self._path.with_name(f"{NAME}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(self._counts), "utf-8")
            part.replace(self._path)
        except OSError:
            part.unlink(missing_ok=True)

    def of(self, texts: Iterable[str]) -> Sequence[float]:
        """Return how often each passage was retrieved."""
        return [float(self._counts[digest(text.encode())]) for text in texts]
