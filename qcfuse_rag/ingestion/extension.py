"""Two of the three points where a method extends the core without the core knowing it.

- `ComputedBase`: a base whose entries a method computes itself when documents are warmed.
- `EntryWriter`: writes entries that are made from other passages, such as captured prompts and answers. Like those of a
  derived base, they are removed with any of these passages.

The third is `runtime.layer_hooks`: a hook on the rows of a layer. What a method measures when it makes an entry goes
into `ChunkKV.notes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.ingestion.prefill import Batch, Ids, PendingChunk, PrefillTarget
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.documents.sources import Sources, may_be_built_on
from qcfuse_rag.store.key import FRAMED, Base, ChunkKey

PassageT = TypeVar("PassageT", bound=Ids | str)


@dataclass(frozen=True, slots=True)
class Related:
    """What is known of how passages belong together, for bases that are derived from other passages.

    Attributes:
        others: token ids of passages that a job does not store but may use; their indices follow those of its chunks.
        neighbours: for each chunk the indices of related passages, best first; None lets the base choose them.
        vectors: `[chunks + others, D]` float32, embeddings; None if there are none.
        retrievals: indices of passages that were retrieved together, one sequence for each retrieval.
    """

    others: Sequence[Ids] = ()
    neighbours: Sequence[Sequence[int]] | None = None
    vectors: NDArray[np.float32] | None = None
    retrievals: Sequence[Sequence[int]] = ()


class EntryPlan(Protocol):
    """How one job makes the entries of a derived base."""

    def origins(self, chunk: PendingChunk) -> tuple[Ids, ...]:
        """Return the token ids of the passages, besides its own, that a chunk's entry is made from."""
        ...

    def tokens_in_front(self, chunk: PendingChunk) -> int:
        """Return the number of tokens in front of a chunk; the chunks of a batch have the same."""
        ...

    def staleness(self, chunk: PendingChunk) -> float:
        """Return the share of a chunk's origins that its stored entry was not made from, in [0, 1]."""
        ...


@dataclass(frozen=True, slots=True)
class ComputedBase(Base, ABC):
    """A base whose entries a method computes itself."""

    @property
    def requires(self) -> tuple[Base, ...]:
        """The bases that each chunk is stored under first."""
        return ()

    def plan(
        self, target: PrefillTarget, chunks: Sequence[Ids], related: Related, writer: EntryWriter | None
    ) -> EntryPlan | None:
        """Return how a job makes the entries of its chunks; None for a base that is not derived from other passages.

        The writer says who may read which passage, and what stored entries were made from; None if nobody knows.

        Raises:
            ValueError: if the base cannot be made from these.
        """
        return None

    @abstractmethod
    def compute(self, target: PrefillTarget, batch: Batch, system_prefix: ChunkKV | None) -> list[ChunkKV]:
        """Return the keys and values of a batch's chunks; `system_prefix` is exact, None if the prompt has none."""


@dataclass(frozen=True, slots=True)
class EntryWriter:
    """Writes entries that are made from passages. They are deleted when one of these passages is deleted.

    Passages are given by their token ids, or by `hash_ids` of them.

    Attributes:
        sources: returns the store's sources; called each time, because a forked process opens them again.
        losses: passages deleted so far, see `Derivations.loss_count`. Those deleted from here on, while a job computes,
            take its entries along.
    """

    target: PrefillTarget
    prompts: PromptBuilder
    sources: Callable[[], Sources]
    losses: int

    def put(
        self, key: ChunkKey, chunk: ChunkKV, origins: Sequence[Ids | str], *, saved_ms: float | None = None
    ) -> bool:
        """Write an entry made from the passages `origins`; see `KVStore.put`.

        Return False if one of its origins was deleted meanwhile, and the entry with it.
        """
        self.begin(key, origins)
        self.target.store.put(key, chunk, saved_ms=saved_ms)
        return self.confirm(key) if any(origins) else True

    def begin(self, key: ChunkKey, origins: Sequence[Ids | str]) -> None:
        """Record the origins of an entry that is about to be written, and delete its earlier version."""
        self.target.store.discard(key)  # its old origins are forgotten here
        self.sources().derivations.set_origins(key, [self._framed(ids) for ids in origins if ids], since=self.losses)

    def confirm(self, key: ChunkKey) -> bool:
        """Delete a written entry if one of its origins was deleted meanwhile; return whether it stays."""
        return self.sources().derivations.keep_if_wanted(key)

    def has_restricted(self) -> bool:
        """Return whether there is a passage that not everybody may read."""
        return self.sources().has_restricted()

    def readers(self, ids: Ids | str) -> frozenset[str]:
        """Return the tags of those who may read a passage; none if no source has it."""
        return self.sources().readers(self._framed(ids)) if ids else frozenset()

    def permitted(self, group: Sequence[PassageT]) -> list[PassageT]:
        """Leave out passages that some reader of a later passage of the group must not read."""
        if not self.has_restricted():
            return list(group)
        readers = [self.readers(ids) for ids in group]
        return [
            ids
            for index, ids in enumerate(group)
            if all(may_be_built_on(later, readers[index]) for later in readers[index + 1 :])
        ]

    def lacking(self, key: ChunkKey, origins: Sequence[Ids], known: frozenset[str]) -> float:
        """Return the share of passages that a stored entry was not made from.

        An entry made from passages that are not `known` lacks none: a job over a part of the corpus would find worse
        ones.
        """
        used = self.sources().derivations.origins(key)
        wanted = {self.name(ids) for ids in origins if ids}
        return len(wanted - used) / len(wanted) if wanted and used <= known else 0.0

    def name(self, ids: Ids) -> str:
        """Return the name of a passage under whatever base it is stored."""
        return self.sources().passage_id(self._framed(ids))

    def _framed(self, ids: Ids | str) -> ChunkKey:
        return self.target.key(FRAMED, ids)
