"""Which passages the entries of a job are made of, so that each goes with any of them, whenever that one goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import ChunkKey

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProvenanceLedger:
    """Notes what a job's entries are made of, and takes back those of which a passage was lost while it ran.

    Attributes:
        sources: of the store; asked for each time, since a fork opens them anew.
        key_of: a passage's key.
        losses: how many passages had been lost when the job was planned, see `Sources.losses`.
    """

    sources: Callable[[], Sources]
    key_of: Callable[[Ids], ChunkKey]
    losses: int

    def made_of(self, key: ChunkKey, passages: Sequence[Ids]) -> None:
        """Note what an entry is made of, before it is written: whatever happens then, it is known.

        Args:
            key: of the entry.
            passages: token ids of those it is made of.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        self.sources().derive(key, [self.key_of(ids) for ids in passages if ids], since=self.losses)

    def written(self, key: ChunkKey) -> bool:
        """Look again at an entry that is made of others, once it is written.

        Returns:
            Whether it may stay; it is removed if a passage it is made of is gone.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        return self.sources().confirm(key)
