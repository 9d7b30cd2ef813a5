"""Maintain a store on disk: check every entry, reclaim space, rebuild the index."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.admin import Progress
from qcfuse_rag.store.backends.base import Miss, check_entry
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.index import INDEX_FAILURES, WRITING, DiskQuota
from qcfuse_rag.store.documents.sources import FILE_NAME, Garbage, Manifest, manifest_damage


@dataclass(slots=True)
class CheckReport:
    """Result of `fsck`.

    Attributes:
        checked: number of entries read from the first byte to the last.
        sound: number of these that are intact.
        damaged: address and reason of entries moved to quarantine.
        unread: address and reason of entries left alone: under another secret, or on a failing disk.
        found: number of files that were missing from the index and have been added.
        lost: number of rows removed from the index because their files are gone.
        leftovers: number of files removed that dead writers left behind.
        reclaimed_bytes: bytes of the limit that are free again.
        ownerless: addresses of entries of forgotten documents, left by jobs that were killed; `qcfuse store gc`
            removes them.
        strays: paths inside the store of what this library did not write; left alone, and nothing is wrong with them.
    """

    checked: int = 0
    sound: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    found: int = 0
    lost: int = 0
    leftovers: int = 0
    reclaimed_bytes: int = 0
    ownerless: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.damaged or self.unread or self.found or self.lost or self.leftovers or self.ownerless)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "clean": self.clean}


def fsck(store: DiskStore, *, progress: Progress | None = None) -> CheckReport:
    """Read and check every entry, and make the index agree with the files. May run while the store is in use.

    Raises:
        StoreError: if the store cannot be written.
    """
    report = CheckReport()
    try:
        store.change(lambda quota: _agree(store, quota, report))
        report.strays = sorted(str(path.relative_to(store.files.folder)) for path in store.files.strays())
        addresses = [address for address, _ in store.files.entries()]
        for done, address in enumerate(addresses, start=1):
            reason = _damage(store, address)
            report.checked += 1
            report.sound += reason is None
            if reason is not None:
                (report.unread if store.files.path(address).exists() else report.damaged).append((address, reason))
            if progress is not None:
                progress(done, len(addresses))
    except INDEX_FAILURES as error:
        raise StoreError(f"cannot check {store.folder}: {error}") from error
    report.ownerless = _ownerless(store)
    return report


def collect_garbage(store: DiskStore) -> int:
    """Remove expired entries, dead writers' files and the quarantine; return how many bytes were freed.

    Raises:
        StoreError: if the store cannot be written.
    """

    def collect(quota: DiskQuota) -> int:
        before = quota.index.size()
        with quota.index.transact():
            quota.reclaim()
            quota.clear_quarantine()
        _remove_leftovers(store, quota)
        return before - quota.index.size()

    try:
        return store.change(collect)
    except INDEX_FAILURES as error:
        raise StoreError(f"cannot clean {store.folder}: {error}") from error


def rebuild(store: DiskStore) -> int:
    """Rebuild the index from the files; return how many entries it has. Uses and pins are lost.

    Raises:
        StoreError: if the index cannot be written.
    """
    try:
        return store.change(DiskQuota.rebuild)
    except INDEX_FAILURES as error:
        raise StoreError(f"cannot rebuild the index of {store.folder}: {error}") from error


def _agree(store: DiskStore, quota: DiskQuota, report: CheckReport) -> None:
    """Make the index agree with the files."""
    before = quota.index.size()
    with quota.index.transact():
        quota.reclaim()
    report.leftovers = _remove_leftovers(store, quota)
    report.lost = quota.remove_lost()
    report.found, report.damaged = quota.index_new_files()
    report.reclaimed_bytes = max(0, before - quota.index.size())


def _ownerless(store: DiskStore) -> list[str]:
    """Return the entries of forgotten documents; none if there is no readable list of documents."""
    if manifest_damage(store.folder) is not None or not (store.folder / FILE_NAME).exists():
        return []
    with closing(Manifest(store.folder)) as manifest:
        return Garbage(manifest, store).ownerless()


def _damage(store: DiskStore, address: str) -> str | None:
    """Read a whole entry; return what is wrong with it, or None. A damaged entry is moved to quarantine."""
    opened = store.open(address)
    if isinstance(opened, Miss):
        return None if opened.reason in ("absent", "expired") else opened.reason
    miss = check_entry(store, address, opened[1])
    return None if miss is None else miss.reason


def _remove_leftovers(store: DiskStore, quota: DiskQuota) -> int:
    """Remove temporary files without a living writer on this machine; return how many."""
    count = 0
    with quota.index.transact():
        writing = {name for name, *_ in quota.index.rows(WRITING)}
        for path in list(store.files.temporaries()):
            if path.name not in writing and store.files.is_abandoned(path.name):
                count += store.files.remove_temporary(path.name)
    return count
