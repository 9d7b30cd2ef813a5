"""The interface of every store of chunk caches, which `store.testing.KVStoreTests` checks, and policies of eviction.

A policy gives every entry a number, and the entry with the smallest is evicted first.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from qcfuse_rag.errors import CorruptEntry, ForeignEntry, StoreError
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import EntryBytes, check_key, open_chunk
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.key import ChunkKey, address_of
from qcfuse_rag.store.quantization import LOSSLESS


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a store returns no entry: `absent`, `expired`, or what is wrong with the entry."""

    reason: str


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What a store knows of an entry without reading it; None for what it does not know."""

    address: str
    size_bytes: int
    kv_dtype: str | None = None
    uses: float | None = None  # how often it was read; older uses count less
    used: float | None = None  # unix time of its last use
    saved_ms: float | None = None  # milliseconds its prefill took, which each use saves
    expires: float | None = None  # unix time from which on it is a miss
    pinned: bool = False

    def completed_by(self, nearer: EntryInfo) -> EntryInfo:
        """Return this with what only a nearer tier knows of the same entry."""
        unknown = {name: getattr(nearer, name) for name, value in asdict(self).items() if value is None}
        return replace(self, **unknown, pinned=self.pinned or nearer.pinned)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's contents, and its counters since it was opened."""

    kind: str
    entries: int
    size_bytes: int  # bytes they take, including those being written or in quarantine
    limit_bytes: int | None  # see `KVStore`; entries are evicted before it is exceeded
    hits: int
    misses: int
    evicted: int = 0  # number of entries evicted to stay within the limit
    discarded: int = 0  # number of entries removed because they were damaged


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a store works."""

    kind: str
    ok: bool
    problems: tuple[str, ...] = ()  # what is wrong, each with what to do about it


class KVStore(ABC):
    """Keeps chunks by content address. Safe to use from several threads.

    `get`, `open` and `in` never raise: damage, a foreign entry or a failing disk is a `Miss` with the reason, since the
    engine can always recompute. A block of an entry is read and checked when it is used, which may raise `CorruptEntry`
    or `OSError`. Writing raises `StoreError`. Methods that take a key or an address accept both.

    Attributes:
        kind: name for reports: `memory`, `disk` and so on.
        kv_dtype: format in which `put` writes, see `store.quantization`.
        folder: folder for files that belong to the store, or None for a store in memory.
        prefix: beginning of the addresses of all its entries; empty unless it is a tenant's.
        limit_bytes: most bytes it may take, or None if this library does not limit it; of several tiers, the last
            one's.
        ttl_s: seconds after which a new entry expires, or None.
    """

    kind: str = "tiered"
    kv_dtype: str = LOSSLESS
    folder: Path | None = None
    prefix: str = ""
    limit_bytes: int | None = None
    ttl_s: float | None = None

    def address(self, key: ChunkKey | str) -> str:
        """Return the address under which this store keeps a key's entry."""
        return address_of(key)

    @abstractmethod
    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk, whose blocks may be read and checked on access, or why there is none; counts as a use."""

    @abstractmethod
    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        """Return an entry with its key, given only its address; does not count as a use."""

    @abstractmethod
    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        """Store a chunk, replacing one under the same key; other entries may be evicted.

        Args:
            key: its key.
            chunk: written in the store's format if it is lossless, else in its own.
            saved_ms: milliseconds its prefill took, which each use saves.

        Raises:
            StoreError: if it cannot be written, or does not fit.
        """

    def note_use(self, address: str) -> None:  # noqa: B027 - most stores do not evict by uses
        """Count a use of an entry that a nearer tier has returned."""

    @abstractmethod
    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        """Remove an entry, with a reason if it is damaged; return whether there was one."""

    @abstractmethod
    def __contains__(self, key: ChunkKey | str) -> bool:
        """Return whether there is an entry, without checking it; does not count as a use."""

    def stored(self, addresses: set[str]) -> set[str]:
        """Return those addresses that have an entry; `StoreError` if a remote cannot be reached."""
        return {address for address in addresses if address in self}

    def restore(self) -> None:  # noqa: B027 - most stores have no folder
        """Create the store's folder again if it was removed while it was open."""

    @abstractmethod
    def entries(self) -> Iterator[EntryInfo]:
        """Yield what is known of every entry, in any order."""

    @abstractmethod
    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        """Exempt an entry from eviction, or undo that; return whether there is such an entry."""

    @abstractmethod
    def stats(self) -> list[StoreStats]:
        """Return contents and counters, one item per tier, nearest first."""

    @abstractmethod
    def health(self) -> list[Health]:
        """Check whether the store works, one item per tier, nearest first."""

    def clear(self) -> int:
        """Remove every entry, including pinned ones; return how many there were."""
        addresses = [entry.address for entry in self.entries()]
        removed = sum(map(self.discard, addresses))
        if left := [address for address in addresses if address in self]:
            raise StoreError(f"{len(left)} of {len(addresses)} entries of the {self.kind} store could not be removed")
        return removed

    @property
    def tiers(self) -> list[KVStore]:
        """The stores this one consists of, nearest first."""
        return [self]

    @property
    def encrypted(self) -> bool:
        """Whether entries outside of this process's memory are encrypted."""
        return bool(self.secret)

    @property
    def secret(self) -> bytes:
        """The secret that encrypts these entries; empty if they are not encrypted."""
        return next((tier.secret for tier in self.tiers if tier is not self and tier.secret), b"")

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:  # noqa: B027 - a store with one tier has nothing to do
        """Start copying entries to the nearest tier; returns at once. Does nothing if there is only one tier."""

    def flush(self) -> None:  # noqa: B027 - most stores write at once
        """Wait until all chunks are in the farthest tier.

        Raises:
            StoreError: if a chunk put since the last call could not be written.
        """

    def close(self) -> None:  # noqa: B027 - a store without files has nothing to do
        """Release files and threads; the store cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EntryStore(KVStore):
    """A store that keeps the bytes of entries outside of this process's memory."""

    def __init__(self, cipher: StoreCipher | None) -> None:
        self.cipher = cipher
        self._counts = {"hits": 0, "misses": 0, "discarded": 0}
        self._lock = threading.Lock()

    @property
    def secret(self) -> bytes:
        return b"" if self.cipher is None else self.cipher.secret

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk, whose blocks are checked when they are used, or why there is none."""
        opened = self._open(key.address, key)
        self._count("misses" if isinstance(opened, Miss) else "hits")
        return opened if isinstance(opened, Miss) else opened[1]

    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        return self._open(address, None)

    @abstractmethod
    def _read(self, address: str) -> EntryBytes:
        """Return the bytes of an entry; raises `FileNotFoundError` if there is none."""

    def _open(self, address: str, key: ChunkKey | None) -> tuple[ChunkKey, ChunkKV] | Miss:
        """Open an entry; a damaged or expired one is discarded."""
        try:
            stored, chunk = open_chunk(self._read(address), self.cipher)
            check_key(stored, key, address)
        except FileNotFoundError:
            return Miss("absent")
        except (ForeignEntry, StoreError) as error:
            return Miss(str(error))
        except CorruptEntry as error:
            self.discard(address, reason=str(error))
            return Miss(str(error))
        except (OSError, ValueError) as error:
            return Miss(f"cannot be read: {error}")
        if chunk.expired:
            self.discard(address)
            return Miss("expired")
        return stored, chunk

    def _count(self, what: str, count: int = 1) -> None:
        with self._lock:
            self._counts[what] += count


def lasting(store: KVStore, keys: Iterable[ChunkKey]) -> set[str]:
    """Return the addresses of those keys whose entries are in the store's farthest tier that can be reached."""
    addresses = {store.address(key) for key in keys}
    for tier in reversed(store.tiers):
        with suppress(StoreError):
            return tier.stored(addresses)
    return set()


def get_checked(store: KVStore, key: ChunkKey) -> ChunkKV | Miss:
    """Return a store's entry with every block read and checked, or why there is none; see `check_entry`."""
    found = store.get(key)
    return found if isinstance(found, Miss) else check_entry(store, key, found) or found


def check_entry(store: KVStore, key: ChunkKey | str, chunk: ChunkKV) -> Miss | None:
    """Read every block of an entry; return why that is not possible, or None. A damaged entry is discarded."""
    try:
        chunk.read()
    except CorruptEntry as error:
        store.discard(key, str(error))
        return Miss(str(error))
    except OSError as error:
        return Miss(f"cannot be read: {error}")
    return None


def evict_removed(store: KVStore, addresses: Iterable[str]) -> None:
    """Remove from each tier what another process removed from the folder behind it; a remote is not asked."""
    removed = list(addresses)
    for near, far in pairwise(store.tiers):
        for address in removed:
            if far.folder is not None and address not in far:  # else it was warmed again meanwhile
                near.discard(address)


HALF_LIFE_S = 7 * 24 * 3600.0
"""A use a week ago counts half."""


@dataclass(frozen=True, slots=True)
class EntryUsage:
    """Size and uses of an entry, from which policies compute its worth."""

    size_bytes: int
    saved_ms: float  # milliseconds a use saves
    uses: float  # number of uses, each counting half as much for every week since; storing counts as 1
    used: float  # unix time of the last use

    def after_uses(self, now: float, count: int = 1) -> EntryUsage:
        """Return the usage after `count` more uses."""
        decayed = self.uses * 2.0 ** (-max(0.0, now - self.used) / HALF_LIFE_S)
        return replace(self, uses=decayed + count, used=max(now, self.used))


def least_frequently_used(usage: EntryUsage) -> float:
    """Rank by uses; older ones count less."""
    return math.log2(usage.uses) + usage.used / HALF_LIFE_S


def least_saving(usage: EntryUsage) -> float:
    """Rank by milliseconds saved per byte, times uses.

    All entries lose worth at the same rate, so the logarithm of today's worth plus the time in half-lives gives the
    same order at any time: the number changes only when an entry is used.
    """
    return least_frequently_used(usage) + math.log2(max(usage.saved_ms, 1e-6) / max(usage.size_bytes, 1))


POLICIES: dict[str, Callable[[EntryUsage], float]] = {
    "cost": least_saving,
    "lru": lambda usage: usage.used,
    "lfu": least_frequently_used,
}


def eviction_policy(name: str) -> Callable[[EntryUsage], float]:
    """Return a policy; raises `ValueError` if there is none of that name."""
    if name not in POLICIES:
        raise ValueError(f"there is no eviction policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]
