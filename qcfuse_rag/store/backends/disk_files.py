"""The files of a store on disk: an entry is one file named after its address, and never changes once it has its name.

`objects/7c/<address>.kv` are entries, in folders by the last two digits; `tmp/` has files being written; `quarantine/`
damaged entries with the reason beside them; `models/<digest>.json` fingerprints of models, to explain misses;
`index/`, `store.json` and `sources.db` belong to `store.backends.disk_index`, `store.backends.disk_settings` and
`store.documents.manifest`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.entry.codec import Buffer
from qcfuse_rag.store.regular_file import open_folder, unlink_file

ENDING, TEMPORARY = ".kv", ".part"
MAX_PARTS_PER_WRITE = 1000
"""`writev` takes 1024 on Linux and macOS."""
ADDRESS_CHARACTERS = frozenset("0123456789abcdef-")
ADDRESS = re.compile("([0-9a-f]{16}-)?[0-9a-f]{32}")
SHARD = re.compile("[0-9a-f]{2}")
TEMPORARY_NAME = re.compile(r"[^/\\]+-[0-9]+-[0-9a-f]{16}\.part")


class StoreFiles:
    """Names, writes, renames and removes the files of a store.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects, self.tmp, self.quarantined = folder / "objects", folder / "tmp", folder / "quarantine"

    def create(self) -> None:
        """Create the folders, for their owner only.

        Raises:
            StoreError: if a folder inside the store's is a symbolic link: files would be written elsewhere.
            OSError: if a folder cannot be created.
        """
        inside = (self.objects, self.tmp, self.quarantined, self.folder / "models")
        for path in (*inside, self.folder / "index"):
            if path.is_symlink():
                raise StoreError(f"{path} is a symbolic link; move the whole store and link to that instead")
        for path in (self.folder, *inside):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, address: str) -> Path:
        """Return the path of an entry, whether it exists or not.

        Raises:
            ValueError: if this is not an address: it might lead out of the folder.
        """
        if not set(address) <= ADDRESS_CHARACTERS:
            raise ValueError(f"not an address: {address!r}")
        return self.objects / address[-2:] / f"{address}{ENDING}"

    def status(self, address: str) -> os.stat_result | None:
        """Return the status of an entry's file; None if there is none, or something else in its place."""
        path = self.path(address)
        if path.parent.is_symlink():
            return None
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status if stat.S_ISREG(status.st_mode) else None

    def new_temporary(self) -> Path:
        """Return a new path to write to; its name says which process writes."""
        return self.tmp / f"{process_namespace()}-{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}"

    def temporary(self, name: str) -> Path:
        """Return the path of a temporary file.

        Raises:
            CorruptEntry: if this library does not give such names.
        """
        return self.tmp / _checked(name, TEMPORARY)

    def allocate(self, path: Path, size: int) -> None:
        """Create a file of a size that is to be written later; it takes no room on the disk yet.

        Raises:
            OSError: if that fails; there is no file then.
        """
        with self._opened_parent(path) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path.name, flags, 0o600, dir_fd=folder)
            try:
                os.ftruncate(descriptor, size)
            except BaseException:
                unlink_file(path.name, folder)
                raise
            finally:
                os.close(descriptor)

    def write(self, path: Path, parts: Sequence[Buffer]) -> None:
        """Write a new file, or one that was allocated in this size, and force it to disk.

        In as few calls as possible: data written at once is in large pages of the cache, which are mapped faster.

        Raises:
            OSError: if that fails; the file is removed then.
        """
        with self._opened_parent(path) as folder:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(path.name, flags, 0o600, dir_fd=folder)
                try:
                    unwritten = [memoryview(part) for part in parts]
                    while unwritten:
                        unwritten = _after(unwritten, os.writev(descriptor, unwritten[:MAX_PARTS_PER_WRITE]))
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except BaseException:
                unlink_file(path.name, folder)
                raise

    def publish(self, temporary: Path, address: str) -> None:
        """Give a written file its name; other processes see all of it from then on.

        Raises:
            OSError: if that fails, as it does if the folder is a link or the name is a folder's.
        """
        path = self.path(address)
        with _opened(self.objects) as objects, suppress(FileExistsError):
            os.mkdir(path.parent.name, mode=0o700, dir_fd=objects)
        self._rename(temporary, path)

    def remove(self, address: str) -> bool:
        """Remove an entry's file; return whether there was one."""
        return self._unlink(self.path(address))

    def quarantine(self, address: str, reason: str) -> Path | None:
        """Move an entry's file to quarantine, with the reason; return its path, or None if there is no file."""
        target, path = self.quarantined / f"{address}{ENDING}", self.path(address)
        if self.status(address) is None:
            return None
        try:
            self._rename(path, target)
        except FileNotFoundError:
            return None
        self.write_json(target.with_suffix(".json"), {"address": address, "reason": reason})
        return target

    def remove_quarantined(self, name: str) -> None:
        """Remove a file from quarantine, and the reason beside it.

        Raises:
            CorruptEntry: if this library does not give such names.
        """
        path = self.quarantined / _checked(name, ENDING)
        for ending in (ENDING, ".json"):
            self._unlink(path.with_suffix(ending))

    def clear_quarantine(self) -> None:
        """Remove all files from quarantine."""
        for path in list(self.quarantined_entries()):
            self.remove_quarantined(path.name)

    def remove_temporary(self, name: str) -> bool:
        """Remove a temporary file; return whether there was one.

        Raises:
            CorruptEntry: if this library does not give such names.
        """
        return self._unlink(self.temporary(name))

    def entries(self) -> Iterator[tuple[str, Path]]:
        """Yield address and path of every entry that has a file; anything else is passed over, see `strays`."""
        for shard in _listed(self.objects):
            if shard.is_dir(follow_symlinks=False) and SHARD.fullmatch(shard.name):
                for file in _listed(Path(shard.path)):
                    address = file.name.removesuffix(ENDING)
                    if _is_entry(file) and address[-2:] == shard.name:
                        yield address, Path(file.path)

    def temporaries(self) -> Iterator[Path]:
        """Yield the path of every file that is being written, or was when its writer died."""
        for file in _listed(self.tmp):
            if TEMPORARY_NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                yield Path(file.path)

    def quarantined_entries(self) -> Iterator[Path]:
        """Yield the path of every damaged entry in quarantine."""
        for file in _listed(self.quarantined):
            if _is_entry(file):
                yield Path(file.path)

    def strays(self) -> Iterator[Path]:
        """Yield the path of everything that this library did not write among entries and temporary files.

        Such things are never opened, moved or removed.
        """
        entries = {path for _, path in self.entries()}
        for shard in _listed(self.objects):
            if not (shard.is_dir(follow_symlinks=False) and SHARD.fullmatch(shard.name)):
                yield Path(shard.path)
                continue
            yield from (path for file in _listed(Path(shard.path)) if (path := Path(file.path)) not in entries)
        for file in _listed(self.quarantined):
            reason = file.name.endswith(".json") and ADDRESS.fullmatch(file.name.removesuffix(".json"))
            if not _is_entry(file) and not (reason and file.is_file(follow_symlinks=False)):
                yield Path(file.path)
        for file in _listed(self.tmp):
            if not (file.name.endswith(TEMPORARY) and file.is_file(follow_symlinks=False)):
                yield Path(file.path)

    def is_abandoned(self, temporary: str) -> bool:
        """Return whether the process that wrote a temporary file ran on this machine and has ended."""
        namespace, _, pid = temporary.rpartition("-")[0].rpartition("-")
        return pid.isdigit() and process_has_ended(namespace, int(pid))

    def write_json(self, path: Path, data: dict[str, Any]) -> None:
        """Write a small file atomically."""
        temporary = self.new_temporary()
        self.write(temporary, [json.dumps(data, indent=2).encode()])
        self._rename(temporary, path)

    @contextmanager
    def _opened_parent(self, path: Path) -> Iterator[int]:
        """Open the folder of a file. No folder inside the store may be a link, whatever it was when it was opened."""
        inside = path.parent.relative_to(self.folder).parts
        with _opened(self.folder / inside[0], *inside[1:]) if inside else _opened(self.folder, follow=True) as folder:
            yield folder

    def _rename(self, source: Path, target: Path) -> None:
        with self._opened_parent(source) as source_folder, self._opened_parent(target) as target_folder:
            os.rename(source.name, target.name, src_dir_fd=source_folder, dst_dir_fd=target_folder)

    def _unlink(self, path: Path) -> bool:
        """Remove a file, unless its folder is a link; return whether there was one."""
        try:
            with self._opened_parent(path) as folder:
                return unlink_file(path.name, folder)
        except OSError:
            inside = path.parent.relative_to(self.folder).parts
            folders = [self.folder.joinpath(*inside[:depth]) for depth in range(1, len(inside) + 1)]
            if all(folder.is_dir() and not folder.is_symlink() for folder in folders):
                raise
            return False


def process_namespace() -> str:
    """Return the scope of this process's number: the machine's name and its process namespace.

    Containers may share a name and a folder, while each numbers its own processes.
    """
    try:
        return f"{platform.node()}.{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:  # not on Linux
        return platform.node()


def process_has_ended(namespace: str, pid: int) -> bool:
    """Return whether a process has ended for certain; False for one of another namespace, which cannot be seen."""
    if namespace != process_namespace():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _checked(name: str, ending: str) -> str:
    """Return the name of a file, unless it leads out of its folder: a tampered index may name any path.

    Raises:
        CorruptEntry: if it does.
    """
    if not name.endswith(ending) or set(name) & {"/", "\\", "\0"} or not _is_expected(name, ending):
        raise CorruptEntry(f"the index names {name!r}, not a file of this store; `qcfuse store rebuild` repairs it")
    return name


def _is_expected(name: str, ending: str) -> bool:
    return ending != ENDING or ADDRESS.fullmatch(name.removesuffix(ending)) is not None


def _is_entry(file: os.DirEntry[str]) -> bool:
    """Return whether a file has an entry's name and is a regular one."""
    name = file.name
    return name.endswith(ENDING) and _is_expected(name, ENDING) and file.is_file(follow_symlinks=False)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing if it does not exist or is not a folder."""
    try:
        with os.scandir(folder) as files:
            return list(files)
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def _opened(folder: Path, *inside: str, follow: bool = False) -> Iterator[int]:
    """Open a folder, which must not be a link unless `follow`, so that nothing is written or removed elsewhere."""
    descriptor = open_folder(folder.resolve() if follow else folder, *inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _after(parts: list[memoryview], written: int) -> list[memoryview]:
    """Return the rest of some parts after their first bytes were written."""
    for index, part in enumerate(parts):
        if written < len(part):
            return [part[written:], *parts[index + 1 :]]
        written -= len(part)
    return []
