"""Record the passages that a job's entries are made from, so that entries are deleted with any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qcfuse_rag.ingestion.target import Ids
from qcfuse_rag.store.documents.sources import Sources
from qcfuse_rag.store.key import ChunkKey


@dataclass(frozen=True, slots=True)
class ProvenanceLedger:
    """Record the origins of a job's entries, and delete entries whose origins were deleted while the job ran.

    Attributes:
        sources: returns the store's sources; called each time, because a forked process opens them again.
        key_of: returns a passage's key.
        losses: number of passages deleted before the job was planned, see `Derivations.loss_count`.
    """

    sources: Callable[[], Sources]
    key_of: Callable[[Ids], ChunkKey]
    losses: int

    def record_origins(self, key: ChunkKey, passages: Sequence[Ids]) -> None:
        """Record the passages that an entry is made from. Call this before the entry is written.

        Args:
            key: key of the entry.
            passages: token ids of the passages.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        self.sources().derivations.set_origins(key, [self.key_of(ids) for ids in passages if ids], since=self.losses)

    def confirm(self, key: ChunkKey) -> bool:
        """Check a written entry again, and delete it if one of its origins was deleted meanwhile.

        Returns:
            Whether the entry stays.

        Raises:
            StoreError: if the manifest cannot be written.
        """
        return self.sources().derivations.keep_if_wanted(key)
