"""Deliberate acts on stored entries: where are they, move them, write them in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.backends.base import EntryInfo, KVStore, Miss
from qcfuse_rag.store.chunk import ChunkKV, to_format
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.low_rank import RANKS
from qcfuse_rag.store.quantization import LOSSLESS, check_numbers

Progress = Callable[[int, int], None]
"""`(done, total) -> None`."""


@dataclass(slots=True)
class ChangeReport:
    """What was done to a number of entries.

    Attributes:
        done: entries it was done to.
        unchanged: entries that were as they should be already.
        missing: entries that are not there, or could not be read; with the reason.
        bytes_before: their size before.
        bytes_after: their size after.
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
    """Return, by address, the kind of the nearest tier that holds each entry, or None."""
    addresses = [store.address(key) for key in keys]
    # First asked for in the whole store: a tenant's view has the tiers of all tenants.
    tiers = {address: store.tiers if address in store else [] for address in addresses}
    return {address: next((tier.kind for tier in own if address in tier), None) for address, own in tiers.items()}


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
        source: where they are.
        target: where to; an entry leaves `source` only once it is there.
        addresses: which; all if None.
        keep: copy instead.
        progress: told after every entry.

    Raises:
        StoreError: if the target cannot be written; what was moved before stays moved.
    """
    report = ChangeReport()
    before = {entry.address: entry for entry in source.entries()}
    wanted = list(before if addresses is None else addresses)
    for done, address in enumerate(wanted, start=1):
        found = source.open(address)
        if isinstance(found, Miss):
            report.missing[address] = found.reason
        else:
            key, chunk = found
            entry = before.get(address)
            try:
                target.put(key, chunk, saved_ms=entry.saved_ms if entry else None)
            except (CorruptEntry, OSError) as error:
                source.discard(address, str(error))
                report.missing[address] = str(error)
                continue
            target.flush()
            report.done += 1
            report.bytes_before += entry.size_bytes if entry else 0
            report.bytes_after += chunk.nbytes
            if not keep:
                source.discard(address)
        if progress is not None:
            progress(done, len(wanted))
    return report


def rewrite(
    store: KVStore, numbers: str, addresses: Iterable[str] | None = None, *, progress: Progress | None = None
) -> ChangeReport:
    """Write entries in a narrower format; precision once lost does not come back.

    Patches, which are of low rank, take fewer bytes as they are and stay so. Later entries are written in the store's
    own format all the same, see `open_store`.

    Args:
        store: whose entries, in every tier.
        numbers: format to write.
        addresses: which; all if None.
        progress: told after every entry.

    Raises:
        StoreError: if the store cannot be written.
        ValueError: if there is no such format, or it is not a narrow one.
    """
    check_numbers(numbers)
    if numbers == LOSSLESS:
        raise ValueError("precision that is gone does not come back; discard the entries and warm them again")
    report = ChangeReport()
    before = {entry.address: entry for entry in store.entries()}
    wanted = list(before if addresses is None else addresses)
    for done, address in enumerate(wanted, start=1):
        found = store.open(address)
        if isinstance(found, Miss):
            report.missing[address] = found.reason
        elif found[1].numbers == numbers or found[1].numbers in RANKS:
            report.unchanged += 1
        else:
            _rewrite(store, found[0], found[1], numbers, before.get(address), report)
        if progress is not None:
            progress(done, len(wanted))
    return report


def _rewrite(
    store: KVStore, key: ChunkKey, chunk: ChunkKV, numbers: str, entry: EntryInfo | None, report: ChangeReport
) -> None:
    try:
        narrow = to_format(chunk, numbers)
    except (CorruptEntry, OSError) as error:
        store.discard(key, str(error))
        report.missing[key.address] = str(error)
        return
    store.put(key, narrow, saved_ms=entry.saved_ms if entry else None)
    report.done += 1
    report.bytes_before += chunk.nbytes
    report.bytes_after += narrow.nbytes
