"""Keep in the manifest what warmed passages are recognised by in a text.

Kept are hashes, as hard to guess as a chunk's address, and the whitespace of each passage. A passage that loses its
last source is no longer recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from qcfuse_rag.models.fingerprint import Fingerprint
from qcfuse_rag.store.documents.passage_match import PassageMatch, PassageSignature, find_passages, passage_signature
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import ChunkKey

INSERT_SIGNATURE = """
INSERT OR REPLACE INTO located SELECT ?1, ?2, ?3, ?4, ?5 WHERE NOT EXISTS (
    SELECT 1 FROM located WHERE name = ?1 AND anchor = ?2 AND atoms = ?3 AND gaps IS ?4 AND passage = ?5
)
"""
"""Does not write a row that exists: every process would read all anchors again."""

HEX_DIGITS = 32
SELECT_ANCHORS = f"SELECT anchor FROM located WHERE substr(name, 1, length(name) - {HEX_DIGITS}) = ?"
"""Of one tenant, whose names have the same characters before the digits; it must not learn how many others have."""


class PassageSignatures:
    """Recognises the passages of a model's chunks.

    Every method raises `StoreError` if the manifest cannot be read or written.

    Args:
        sources: returns the store's sources; called each time, since a fork opens them anew.
        fingerprint: the model.
    """

    def __init__(self, sources: Callable[[], Sources], fingerprint: Fingerprint) -> None:
        self._sources, self._fingerprint = sources, fingerprint
        self._anchors: tuple[object, frozenset[int]] = (None, frozenset())

    @cached_property
    def _seed(self) -> int:
        """Seed of the hashes, which differs between stores and tenants."""
        return int(self._name("")[-16:], 16)

    def add(self, passages: Iterable[tuple[str, ChunkKey]]) -> None:
        """Recognise these passages from now on.

        Args:
            passages: texts as they will be in prompts, with a key of each under any base.
        """
        rows = [
            (
                self._name(signature.name),
                signature.anchor,
                signature.atoms,
                signature.gaps,
                self._sources().passage_id(key),
            )
            for text, key in passages
            if (signature := passage_signature(text, self._seed)) is not None
        ]
        with self._sources().manifest.writing() as database:
            database.executemany(INSERT_SIGNATURE, rows)

    def count(self) -> int:
        """Return how many passages can be recognised; those with the same beginning count once."""
        return len(self._known_anchors())

    def find(self, text: str) -> list[PassageMatch]:
        """Return the passages in a text, in order."""
        anchors = self._known_anchors()
        if not anchors:
            return []
        known = lambda anchor: self._with_anchor(anchor) if anchor in anchors else ()  # noqa: E731
        return find_passages(text, self._seed, known, self._name)

    def _with_anchor(self, anchor: int) -> list[PassageSignature]:
        rows = self._sources().manifest.read("SELECT name, atoms, gaps FROM located WHERE anchor = ?", anchor)
        return [PassageSignature(anchor, atoms, name, gaps) for name, atoms, gaps in rows]

    def _known_anchors(self) -> frozenset[int]:
        """Return all anchors, read again whenever somebody has written to the manifest."""
        manifest, (seen, anchors) = self._sources().manifest, self._anchors
        version = manifest, manifest.version()
        if version != seen:
            rows = manifest.read(SELECT_ANCHORS, self._name("")[:-HEX_DIGITS])
            anchors = frozenset(anchor for (anchor,) in rows)
            self._anchors = (version, anchors)
        return anchors

    def _name(self, digest: str) -> str:
        """Return the name under which a passage with this digest of atoms is kept."""
        return self._sources().passage_id(ChunkKey(self._fingerprint, "located", "", digest))
