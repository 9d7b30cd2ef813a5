"""Looking after a store on disk: check everything, take back room, make the index again, wipe."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.disk_index import ENTRY, INDEX_FAILURES, PINNED, QUARANTINE, WRITING
from qcfuse_rag.store.backends.disk_quota import DiskQuota

Progress = Callable[[int, int], None]
"""`(done, total) -> None`."""

BLOCK_BYTES = 1 << 20
FOLDERS = ("objects", "tmp", "quarantine", "models", "index", "verdicts")
FILES = ("store.json", "sources.db", "costs-", "profile.json")


@dataclass(slots=True)
class CheckReport:
    """What `fsck` found and did.

    Attributes:
        checked: entries read from the first byte to the last.
        sound: those that are what they should be.
        damaged: address and reason of those moved to quarantine.
        unread: address and reason of those left where they are: under another secret, or on a disk that fails.
        found: files the index did not know, taken up.
        lost: rows of the index whose files are gone, removed.
        leftovers: files that writers left behind, removed.
        reclaimed_bytes: bytes taken back from the limit by all of this.
    """

    checked: int = 0
    sound: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    found: int = 0
    lost: int = 0
    leftovers: int = 0
    reclaimed_bytes: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing was amiss."""
        return not (self.damaged or self.unread or self.found or self.lost or self.leftovers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "clean": self.clean}


def fsck(store: DiskStore, *, progress: Progress | None = None) -> CheckReport:
    """Read and check every entry, and make files and index agree. May run while the store is in use.

    Args:
        store: the store.
        progress: told after every entry.

    Raises:
        StoreError: if the store cannot be written.
    """
    room, report = _room(store), CheckReport()
    try:
        before = room.index.size()
        with room.index.transact():
            room.reclaim()
        report.leftovers = _remove_leftovers(store, room)
        report.lost = _remove_lost(store, room)
        report.found = room.adopt_all()
        report.reclaimed_bytes = max(0, before - room.index.size())
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
    return report


def collect_garbage(store: DiskStore) -> int:
    """Remove what has expired, what writers left, and what is in quarantine; return how many bytes that was.

    Raises:
        StoreError: if the store cannot be written.
    """
    room = _room(store)
    try:
        before = room.index.size()
        with room.index.transact():
            room.reclaim()
            for name, *_ in list(room.index.rows(QUARANTINE)):
                store.files.remove_quarantined(name)
                room.index.delete(name)
        _remove_leftovers(store, room)
        return before - room.index.size()
    except INDEX_FAILURES as error:
        raise StoreError(f"cannot clean {store.folder}: {error}") from error


def rebuild(store: DiskStore) -> int:
    """Make the index again from the files, and return how many entries it has; uses and pins are lost.

    Raises:
        StoreError: if it cannot be written.
    """
    room = _room(store)
    try:
        with room.index.transact():  # so that nobody finds room where there is none, even if this process dies
            room.index.clear()
            room.adopt_all()
            return room.index.count(ENTRY)
    except INDEX_FAILURES as error:
        raise StoreError(f"cannot make the index of {store.folder} again: {error}") from error


def wipe(folder: Path, also: Iterable[Path] = ()) -> int:
    """Overwrite every file of a store with zeros, then remove them; return how many there were. Other files stay.

    Programs that use the store must be stopped first. Flash memory, journals, snapshots and backups may keep older
    copies all the same: a store that must be erasable for certain is one that is encrypted, and whose secret is
    destroyed.

    Args:
        folder: of the store.
        also: more files to treat so.

    Raises:
        StoreError: if it cannot be done.
    """
    if not (folder / "objects").is_dir():
        raise StoreError(f"no store in {folder}")
    count = 0
    try:
        inside = [path for place in FOLDERS for path in (folder / place).rglob("*")]
        for path in [*inside, *(path for name in FILES for path in folder.glob(f"{name}*")), *also]:
            if path.is_symlink() or not path.is_file():
                continue
            with open(path, "r+b", buffering=0) as file:
                left = os.fstat(file.fileno()).st_size
                while left > 0:
                    left -= file.write(bytes(min(left, BLOCK_BYTES)))
                os.fsync(file.fileno())
            path.unlink()
            count += 1
        for place in FOLDERS:
            shutil.rmtree(folder / place, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"cannot wipe {folder}: {error}") from error
    return count


def _room(store: DiskStore) -> DiskQuota:
    if store.quota is None:
        raise StoreError(f"cannot write to {store.folder}: {'; '.join(store.health()[0].problems)}")
    return store.quota


def _damage(store: DiskStore, address: str) -> str | None:
    """Read an entry whole; return what is wrong with it. What is damaged has then been moved to quarantine."""
    found = store.open(address)
    if isinstance(found, Miss):
        return None if found.reason in ("absent", "expired") else found.reason
    try:
        found[1].read()
    except CorruptEntry as error:
        store.discard(address, reason=str(error))
        return str(error)
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def _remove_lost(store: DiskStore, room: DiskQuota) -> int:
    count = 0
    for name, _, _, tag in list(room.index.rows(ENTRY, PINNED, QUARANTINE)):
        path = store.files.quarantined / name if tag == QUARANTINE else store.files.path(name)
        with room.index.transact():
            if not path.exists():
                count += room.index.delete(name)
    return count


def _remove_leftovers(store: DiskStore, room: DiskQuota) -> int:
    """Remove temporary files that no living writer on this machine is writing."""
    count = 0
    with room.index.transact():
        writing = {name for name, *_ in room.index.rows(WRITING)}
        for path in list(store.files.tmp.iterdir()):
            if path.name not in writing and store.files.is_abandoned(path.name):
                path.unlink(missing_ok=True)
                count += 1
    return count
