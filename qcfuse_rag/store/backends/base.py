"""What every store of chunk caches must do; `store.testing.KVStoreTests` checks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey, address_of
from qcfuse_rag.store.quantization import LOSSLESS


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a store has nothing to give: `absent`, or what was wrong with what it had."""

    reason: str


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What a store knows of an entry without reading it; None where it does not.

    Attributes:
        address: its name, see `ChunkKey.address`.
        size_bytes: what it takes.
        numbers: format it is written in.
        uses: how often it was read, older uses counting less.
        used: unix time of its last use.
        saved_ms: what a use saves: milliseconds its prefill took.
        expires: unix time from which on it is a miss.
        pinned: whether eviction passes it over.
    """

    address: str
    size_bytes: int
    numbers: str | None = None
    uses: float | None = None
    used: float | None = None
    saved_ms: float | None = None
    expires: float | None = None
    pinned: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's contents and what happened to it since it was opened.

    Attributes:
        kind: which store.
        entries: chunks it holds.
        size_bytes: bytes they take, with what is being written and what is in quarantine.
        limit_bytes: bytes it may take; entries are evicted before that is exceeded. None if it is not for this library
            to bound, as a bucket or a server is not.
        hits, misses: answers of `get`.
        evicted: entries removed to make room.
        discarded: entries found damaged and removed.
    """

    kind: str
    entries: int
    size_bytes: int
    limit_bytes: int | None
    hits: int
    misses: int
    evicted: int = 0
    discarded: int = 0

    def to_dict(self) -> dict[str, str | int | None]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a store works.

    Attributes:
        kind: which store.
        ok: whether it can be read and written.
        problems: what is wrong, each with what to do about it.
    """

    kind: str
    ok: bool
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


class KVStore(ABC):
    """Keeps chunks by content address. Safe to use from several threads.

    Reading never raises: damage, a foreign entry or a failing disk is a `Miss` with the reason, since the engine can
    always recompute. Writing raises `StoreError`. Where a method takes a key, an address will do.

    Attributes:
        kind: what it is, for reports: `memory`, `disk` and so on.
        numbers: format in which `put` writes, see `store.quantization`.
        folder: where things that belong to the store can be kept beside it, or None if it lives in memory.
        prefix: what the addresses of all its entries begin with, if it is a tenant's.
        limit_bytes: most bytes it may take, or None if that is not for this library to bound; of several tiers, the
            last one's.
        ttl_s: seconds after which a new entry is gone, or None.
    """

    kind: str = "tiered"
    numbers: str = LOSSLESS
    folder: Path | None = None
    prefix: str = ""
    limit_bytes: int | None = None
    ttl_s: float | None = None

    def address(self, key: ChunkKey | str) -> str:
        """Return the address under which this store keeps a key's entry."""
        return address_of(key)

    @abstractmethod
    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk, whose blocks may be read and checked only on access, or why there is none."""

    @abstractmethod
    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        """Return an entry with its key, for those who know only its address; does not count as a use."""

    @abstractmethod
    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        """Keep a chunk, replacing one under the same key; other entries may be evicted to make room.

        Args:
            key: its key.
            chunk: written in the store's format of numbers, or in its own if that is narrow already.
            saved_ms: milliseconds its prefill took, which is what keeping it saves.

        Raises:
            StoreError: if it cannot be written or there can be no room for it.
        """

    @abstractmethod
    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        """Remove an entry, `reason` saying what was found wrong with it; return whether there was one."""

    @abstractmethod
    def __contains__(self, key: ChunkKey | str) -> bool:
        """Return whether there is an entry; does not count as a use and does not check it."""

    @abstractmethod
    def entries(self) -> Iterator[EntryInfo]:
        """Yield what is known of every entry, in no particular order."""

    @abstractmethod
    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        """Keep an entry from being evicted, or allow it again; return whether there is such an entry."""

    @abstractmethod
    def stats(self) -> list[StoreStats]:
        """Return contents and counters, one item per tier, nearest first."""

    @abstractmethod
    def health(self) -> list[Health]:
        """Try whether the store works, one item per tier, nearest first."""

    def clear(self) -> int:
        """Remove every entry, pinned ones too, and return how many that was.

        Raises:
            StoreError: if it cannot be done.
        """
        return sum(self.discard(entry.address) for entry in list(self.entries()))

    @property
    def tiers(self) -> list[KVStore]:
        """The stores this one is made of, nearest first."""
        return [self]

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:  # noqa: B027 - a store with one tier has nothing to do
        """Start bringing entries nearer; returns at once. Does nothing where there is only one tier."""

    def hint(self, keys: Iterable[ChunkKey], *, steps: int = 1) -> None:  # noqa: B027 - most stores evict by the past
        """Say which entries will be asked for in so many steps; returns at once.

        They are brought to the nearest tier and, if that is in memory, stay there before others until they were used
        or sooner ones take their room. Keys without an entry are harmless.

        Raises:
            ValueError: if `steps` is less than 1.
        """

    def advance(self) -> None:  # noqa: B027
        """Let one of the steps that hints are counted in go by."""

    def evict_removed(self, addresses: Iterable[str]) -> None:  # noqa: B027
        """Let go of what was removed behind this store's back, as by another process that forgot a document."""

    def admits(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Return whether a chunk found farther away would come in without putting out what is expected sooner."""
        return True

    def flush(self) -> None:  # noqa: B027 - most stores write at once
        """Wait until everything put is where it is to stay.

        Raises:
            StoreError: if something put since the last call could not be written.
        """

    def close(self) -> None:  # noqa: B027 - a store without files has nothing to do
        """Release files and threads; the store cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
