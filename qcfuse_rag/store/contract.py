"""What every store of chunk caches must do; `store.testing.KVStoreTests` checks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a store has nothing to give: `absent`, or what was wrong with what it had."""

    reason: str


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's contents and what happened to it since it was opened.

    Attributes:
        kind: which store.
        entries: chunks it holds.
        size_bytes: bytes they take.
        limit_bytes: bytes it may take; entries are evicted beyond that.
        hits, misses: answers of `get`.
        discarded: entries found damaged and removed.
    """

    kind: str
    entries: int
    size_bytes: int
    limit_bytes: int
    hits: int
    misses: int
    discarded: int

    def to_dict(self) -> dict[str, str | int]:
        """Return plain data for JSON."""
        return asdict(self)


class KVStore(ABC):
    """Keeps chunks by content address. Safe to use from several threads.

    Reading never raises: damage, a foreign entry or a failing disk is a `Miss` with the reason, since the engine can
    always recompute. Writing raises `StoreError`.
    """

    @abstractmethod
    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk, whose blocks may be read and checked only on access, or why there is none."""

    @abstractmethod
    def put(self, key: ChunkKey, chunk: ChunkKV) -> None:
        """Keep a chunk, replacing one under the same key; older entries may be evicted to make room.

        Raises:
            StoreError: if it cannot be written or is larger than the whole store may be.
        """

    @abstractmethod
    def discard(self, key: ChunkKey, reason: str | None = None) -> bool:
        """Remove an entry, `reason` saying what was found wrong with it; return whether there was one."""

    @abstractmethod
    def __contains__(self, key: ChunkKey) -> bool:
        """Return whether there is an entry; does not count as a use and does not check it."""

    @abstractmethod
    def clear(self) -> int:
        """Remove everything and return how many entries that was."""

    @abstractmethod
    def stats(self) -> list[StoreStats]:
        """Return contents and counters, one item per tier."""

    def prefetch(self, keys: list[ChunkKey]) -> None:  # noqa: B027 - a store with one tier has nothing to do
        """Start bringing entries nearer; returns at once. Does nothing where there is only one tier."""

    def close(self) -> None:  # noqa: B027 - a store without files has nothing to do
        """Release files and threads; the store cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
