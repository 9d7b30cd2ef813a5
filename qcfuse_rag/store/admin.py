"""Administer a store: move and compress entries, check every one, reclaim space, rebuild the index, wipe it all.

Every function that changes a store raises `StoreError` if it cannot be written.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.backends.base import KVStore, Miss, check_entry
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.files import FILES_BESIDE, FOLDERS
from qcfuse_rag.store.backends.index import DiskQuota
from qcfuse_rag.store.chunk import ChunkKV, to_format, to_store_format
from qcfuse_rag.store.documents.sources import FILE_NAME, Garbage, Manifest, manifest_damage
from qcfuse_rag.store.entry.codec import MappedFile, open_chunk
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.quantization import LOSSLESS

Progress = Callable[[int, int], None]
"""`(done, total) -> None`."""


@dataclass(slots=True)
class ChangeReport:
    """Result of a change to a number of entries."""

    done: int = 0
    unchanged: int = 0  # number of entries that needed no change
    missing: dict[str, str] = field(default_factory=dict)  # reason by address, of entries that could not be read
    bytes_before: int = 0
    bytes_after: int = 0


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
    """Move entries, all if no addresses are given, to another store; read and check every byte on the way.

    An entry is removed from `source` only after it was written to `target`; `keep` copies instead of moving.
    """
    return _copy(source, target, lambda chunk: to_store_format(chunk, target.kv_dtype), addresses, progress, keep=keep)


def compress(
    store: KVStore, addresses: Iterable[str] | None = None, *, progress: Progress | None = None
) -> ChangeReport:
    """Rewrite entries in the model's own dtype as int8; lost precision does not come back.

    The format of later entries does not change, see `open_store`.
    """

    def smaller(chunk: ChunkKV) -> ChunkKV | None:
        return to_format(chunk, "int8") if chunk.kv_dtype == LOSSLESS else None

    return _copy(store, store, smaller, addresses, progress, keep=True)


def _copy(
    source: KVStore,
    target: KVStore,
    convert: Callable[[ChunkKV], ChunkKV | None],
    addresses: Iterable[str] | None,
    progress: Progress | None,
    *,
    keep: bool,
) -> ChangeReport:
    """Put entries into a store, converted; those for which `convert` returns None stay as they are."""
    report = ChangeReport()
    known = {entry.address: entry for entry in source.entries()}
    wanted = list(known if addresses is None else addresses)
    for done, address in enumerate(wanted, start=1):
        opened = source.open(address)
        if isinstance(opened, Miss):
            report.missing[address] = opened.reason
        else:
            try:
                converted = convert(opened[1])
                if converted is None:
                    report.unchanged += 1
                else:
                    saved_ms = known[address].saved_ms if address in known else None
                    target.put(opened[0], converted, saved_ms=saved_ms)
                    if target is not source:
                        target.flush()
                    report.done += 1
                    report.bytes_before += opened[1].nbytes
                    report.bytes_after += converted.nbytes
                    if not keep:
                        source.discard(address)
            except (CorruptEntry, OSError) as error:
                if isinstance(error, CorruptEntry):  # a disk may fail only for a while
                    source.discard(address, str(error))
                report.missing[address] = str(error)
        if progress is not None:
            progress(done, len(wanted))
    return report


def count_by_model(store: DiskStore) -> dict[str, tuple[int, int]]:
    """Return number and bytes of each model's entries, by the digest of its fingerprint; reads every header."""
    sizes: dict[str, list[int]] = {}
    for entry in store.entries():
        with suppress(OSError, CorruptEntry):
            header = MappedFile(store.files.path(entry.address), header_only=True)
            sizes.setdefault(open_chunk(header, store.cipher)[0].fingerprint.digest, []).append(entry.size_bytes)
    return {name: (len(found), sum(found)) for name, found in sizes.items()}


@dataclass(slots=True)
class CheckReport:
    """Result of `fsck`; `qcfuse store gc` removes what is ownerless, and nothing is wrong with strays."""

    checked: int = 0  # number of entries read from the first byte to the last
    sound: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)  # address and reason of entries moved to quarantine
    unread: list[tuple[str, str]] = field(default_factory=list)  # of entries under another secret, or on a failing disk
    found: int = 0  # number of files that were missing from the index and have been added
    lost: int = 0  # number of rows removed from the index because their files are gone
    leftovers: int = 0  # number of files removed that dead writers left behind
    reclaimed_bytes: int = 0  # bytes of the limit that are free again
    ownerless: list[str] = field(default_factory=list)  # addresses, of forgotten documents; killed jobs left them
    strays: list[str] = field(default_factory=list)  # paths inside the store of what this library did not write

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.damaged or self.unread or self.found or self.lost or self.leftovers or self.ownerless)


def fsck(store: DiskStore, *, progress: Progress | None = None) -> CheckReport:
    """Read and check every entry, and make the index agree with the files. May run while the store is in use."""
    report = CheckReport()

    def agree(quota: DiskQuota) -> None:
        before = quota.index.size()
        with quota.index.transact():
            report.leftovers = quota.reclaim()
        report.lost = quota.remove_lost()
        report.found, report.damaged = quota.index_new_files()
        report.reclaimed_bytes = max(0, before - quota.index.size())

    try:
        store.change(agree)
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
    except OSError as error:
        raise StoreError(f"cannot check {store.folder}: {error}") from error
    if manifest_damage(store.folder) is None and (store.folder / FILE_NAME).exists():
        with closing(Manifest(store.folder)) as manifest:
            report.ownerless = Garbage(manifest, store).ownerless()
    return report


def collect_garbage(store: DiskStore) -> int:
    """Remove expired entries, dead writers' files and the quarantine; return how many bytes were freed."""

    def collect(quota: DiskQuota) -> int:
        before = quota.index.size()
        with quota.index.transact():
            quota.reclaim()
            quota.clear_quarantine()
        return before - quota.index.size()

    return store.change(collect)


def rebuild(store: DiskStore) -> int:
    """Rebuild the index from the files; return how many entries it has. Uses and pins are lost."""
    return store.change(DiskQuota.rebuild)


def _damage(store: DiskStore, address: str) -> str | None:
    """Read a whole entry; return what is wrong with it, or None. A damaged entry is moved to quarantine."""
    opened = store.open(address)
    if isinstance(opened, Miss):
        return None if opened.reason in ("absent", "expired") else opened.reason
    miss = check_entry(store, address, opened[1])
    return None if miss is None else miss.reason


BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class WipeReport:
    """Result of `wipe`."""

    files: int = 0  # number of files that were overwritten and removed
    linked: list[str] = field(default_factory=list)  # paths removed and not overwritten: they had another hard link
    left: list[str] = field(default_factory=list)  # paths left alone: links, and what this library did not write


def wipe(folder: Path, also: Iterable[Path] = ()) -> WipeReport:
    """Overwrite every file that this library wrote into a store with zeros, then remove it. Everything else stays.

    Symbolic links are not followed. A file with another name is removed only: its bytes may be another program's.

    Programs that use the store must be stopped first: what they have mapped would turn into zeros. Flash memory,
    journals, snapshots and backups may still have older copies. To be certain that a store can be erased, encrypt it,
    and destroy its secret.

    Raises:
        StoreError: if there is no store in the folder, a program uses it, or a file cannot be wiped.
    """
    report = WipeReport()
    try:
        if not (folder / "objects").is_dir():
            raise StoreError(f"there is no store in {folder}")
        if _is_used(folder / "index" / "cache.db"):
            raise StoreError(f"a program uses the store in {folder}; stop it, then wipe")
        for name, own in FOLDERS.items():
            top = folder / name
            if top.is_symlink():
                report.left.append(str(top))
                continue
            for root, folders, files in os.walk(top, topdown=False):
                for path in (Path(root, file) for file in files):
                    if own.fullmatch(path.relative_to(top).as_posix()):
                        _wipe_file(path, report)
                    else:
                        report.left.append(str(path))
                report.left += [str(path) for inside in folders if (path := Path(root, inside)).is_symlink()]
                with suppress(OSError):  # something was left in it
                    os.rmdir(root)
        for path in (*(path for path in folder.iterdir() if FILES_BESIDE.fullmatch(path.name)), *also):
            _wipe_file(path, report)
    except OSError as error:
        raise StoreError(f"cannot wipe {folder}: {error}") from error
    return report


def _is_used(database: Path) -> bool:
    """Return whether a program has the index of a store open: SQLite leaves its log only if nobody else has."""
    if database.parent.is_symlink() or database.is_symlink() or not database.is_file():
        return False
    try:
        with closing(sqlite3.connect(database, timeout=0)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE").fetchall()
    except sqlite3.Error as error:
        return "locked" in str(error)
    return False


def _wipe_file(path: Path, report: WipeReport) -> None:
    """Overwrite and remove a file, if it is a regular file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        report.left.append(str(path))
        return
    if status.st_nlink == 1:
        with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb", buffering=0) as file:
            remaining = status.st_size
            while remaining > 0:
                remaining -= file.write(bytes(min(remaining, BLOCK_BYTES)))
            os.fsync(file.fileno())
        report.files += 1
    else:
        report.linked.append(str(path))
    path.unlink()
