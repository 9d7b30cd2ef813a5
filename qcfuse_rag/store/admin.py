"""Administer stored entries: look them up, move them to another store, rewrite them in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.backends.base import EntryInfo, KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV, to_format, to_store_format
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.quantization import LOSSLESS, RANKS, check_numbers

Progress = Callable[[int, int], None]
"""`(done, total) -> None`."""


@dataclass(slots=True)
class ChangeReport:
    """Result of a change to a number of entries.

    Attributes:
        done: number of entries changed.
        unchanged: number of entries that needed no change.
        missing: reason by address, for entries that do not exist or could not be read.
        bytes_before: size of the changed entries before.
        bytes_after: size of the changed entries after.
    """

    done: int = 0
    unchanged: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def lookup(store: KVStore, keys: Iterable[ChunkKey | str]) -> dict[str, str | None]:
    """Return, by address, the kind of the nearest tier that has each entry, or None."""
    addresses = [store.address(key) for key in keys]
    # The store itself is asked first: the tiers of a tenant's view have the entries of all tenants.
    tiers = {address: store.tiers if address in store else [] for address in addresses}
    return {address: next((tier.kind for tier in tiers[address] if address in tier), None) for address in addresses}


def move(
    source: KVStore,
    target: KVStore,
    addresses: Iterable[str] | None = None,
    *,
    keep: bool = False,
    progress: Progress | None = None,
) -> ChangeReport:
    """Move entries from one store to another, reading and checking every byte on the way.

    Args:
        source: store to move from.
        target: store to move to; an entry is removed from `source` only after it was written here.
        addresses: of the entries; all if None.
        keep: copy instead of moving.
        progress: called after every entry.

    Raises:
        StoreError: if the target cannot be written; entries that were moved before stay moved.
    """
    report = ChangeReport()
    for address, key, chunk, entry in _opened(source, addresses, report, progress):
        try:
            converted = to_store_format(chunk, target.numbers)
            target.put(key, converted, saved_ms=entry.saved_ms if entry else None)
        except (CorruptEntry, OSError) as error:
            _report_unreadable(source, address, error, report)
            continue
        target.flush()
        report.done += 1
        report.bytes_before += entry.size_bytes if entry else 0
        report.bytes_after += converted.nbytes
        if not keep:
            source.discard(address)
    return report


def rewrite(
    store: KVStore, numbers: str, addresses: Iterable[str] | None = None, *, progress: Progress | None = None
) -> ChangeReport:
    """Rewrite entries in a smaller format; lost precision does not come back.

    Patches stay as they are: low rank takes fewer bytes still. The format of later entries does not change, see
    `open_store`.

    Args:
        store: whose entries, in every tier.
        numbers: `int8` or `fp8`.
        addresses: of the entries; all if None.
        progress: called after every entry.

    Raises:
        StoreError: if the store cannot be written.
        ValueError: if there is no such format, or it is `model`.
    """
    check_numbers(numbers)
    if numbers == LOSSLESS:
        raise ValueError("lost precision does not come back; discard the entries and warm them again")
    report = ChangeReport()
    for address, key, chunk, entry in _opened(store, addresses, report, progress):
        if chunk.numbers == numbers or chunk.numbers in RANKS:
            report.unchanged += 1
            continue
        try:
            smaller = to_format(chunk, numbers)
        except (CorruptEntry, OSError) as error:
            _report_unreadable(store, address, error, report)
            continue
        store.put(key, smaller, saved_ms=entry.saved_ms if entry else None)
        report.done += 1
        report.bytes_before += chunk.nbytes
        report.bytes_after += smaller.nbytes
    return report


def _opened(
    store: KVStore, addresses: Iterable[str] | None, report: ChangeReport, progress: Progress | None
) -> Iterator[tuple[str, ChunkKey, ChunkKV, EntryInfo | None]]:
    """Yield each entry that can be opened, and what the store knew of it; report the others as missing."""
    known = {entry.address: entry for entry in store.entries()}
    wanted = list(known if addresses is None else addresses)
    for done, address in enumerate(wanted, start=1):
        opened = store.open(address)
        if isinstance(opened, Miss):
            report.missing[address] = opened.reason
        else:
            yield address, *opened, known.get(address)
        if progress is not None:
            progress(done, len(wanted))


def _report_unreadable(store: KVStore, address: str, error: Exception, report: ChangeReport) -> None:
    """Report an entry that cannot be read, and discard it if it is damaged; a disk may fail only for a while."""
    if isinstance(error, CorruptEntry):
        store.discard(address, str(error))
    report.missing[address] = str(error)
