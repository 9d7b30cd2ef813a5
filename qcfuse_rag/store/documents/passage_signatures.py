"""By what warmed passages are recognised in a text, kept beside what is known of their sources.

What is kept are hashes, as hard to guess as a chunk's address, and the whitespace of each passage. A passage that loses
its last source is no longer recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.documents.passage_match import Found, Traits, locate, traits
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import ChunkKey

KNOWN = """
INSERT OR REPLACE INTO located SELECT ?1, ?2, ?3, ?4, ?5 WHERE NOT EXISTS (
    SELECT 1 FROM located WHERE name = ?1 AND anchor = ?2 AND atoms = ?3 AND gaps IS ?4 AND passage = ?5
)
"""
"""Nothing is written that is there already: every process would read all anchors again."""

HEX_DIGITS = 32
ANCHORS = f"SELECT anchor FROM located WHERE substr(name, 1, length(name) - {HEX_DIGITS}) = ?"
"""Those of whom an address says by what stands before its digits."""


class Located:
    """Recognises the passages of a model's chunks.

    Args:
        sources: of the store; asked for each time, since a fork opens them anew.
        fingerprint: the model.
    """

    def __init__(self, sources: Callable[[], Sources], fingerprint: Fingerprint) -> None:
        self._sources, self._fingerprint = sources, fingerprint
        self._seed = int(self._name("")[-16:], 16)
        self._anchors: tuple[object, frozenset[int]] = (None, frozenset())

    def add(self, passages: Iterable[tuple[str, ChunkKey]]) -> None:
        """Recognise these from now on.

        Args:
            passages: texts, as they will stand in prompts, with a key of each under any base.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        rows = [
            (self._name(one.name), one.anchor, one.atoms, one.gaps, self._sources().passage(key))
            for text, key in passages
            if (one := traits(text, self._seed)) is not None
        ]
        with self._sources().writing() as database:
            database.executemany(KNOWN, rows)

    @property
    def count(self) -> int:
        """How many passages could be recognised, less those that begin alike.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        return len(self._known_anchors())

    def find(self, text: str) -> list[Found]:
        """Return the passages that stand in a text, in order.

        Raises:
            StoreError: if the manifest cannot be read.
        """
        anchors = self._known_anchors()
        if not anchors:
            return []
        return locate(text, self._seed, lambda anchor: self._of(anchor) if anchor in anchors else (), self._name)

    def _of(self, anchor: int) -> list[Traits]:
        rows = self._sources().read("SELECT name, atoms, gaps FROM located WHERE anchor = ?", anchor)
        return [Traits(anchor, atoms, name, gaps) for name, atoms, gaps in rows]

    def _known_anchors(self) -> frozenset[int]:
        """Return all anchors, read again when somebody has written since."""
        sources, (seen, anchors) = self._sources(), self._anchors
        version = sources, sources.version
        if version != seen:
            # A tenant is not told how many passages others have.
            anchors = frozenset(row[0] for row in sources.read(ANCHORS, self._name("")[:-HEX_DIGITS]))
            self._anchors = (version, anchors)
        return anchors

    def _name(self, digest: str) -> str:
        return self._sources().passage(ChunkKey(self._fingerprint, "located", "", digest))
