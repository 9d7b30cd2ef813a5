"""The files of a store on disk: an entry is one file named after its address, and never changes once it has its name.

`objects/7c/<address>.kv` are entries, in folders by the last two digits; `tmp/` has files being written; `quarantine/`
damaged entries with the reason beside them; `models/<digest>.json` fingerprints of models, to explain misses. `index/`,
`store.json` and `sources.db` belong to `store.backends.index`, `store.backends.disk` and `store.documents`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcfuse_rag.errors import CorruptEntry

if TYPE_CHECKING:  # `library.jobs` imports this, and torch imports slowly
    from qcfuse_rag.store.entry.codec import Buffer

ENDING, TEMPORARY = ".kv", ".part"
MAX_PARTS_PER_WRITE = 1000
"""`writev` takes 1024 on Linux and macOS."""
ADDRESS = re.compile("([0-9a-f]{16}-)?[0-9a-f]{32}")
SHARD = re.compile("[0-9a-f]{2}")
_PART = r"(\.[0-9a-f]{16}\.part)?"
FOLDERS = {
    "objects": re.compile(rf"{SHARD.pattern}/{ADDRESS.pattern}\.kv"),
    "tmp": re.compile(r"[^/]+\.part"),
    "quarantine": re.compile(rf"{ADDRESS.pattern}\.(kv|json)"),
    "models": re.compile(r"[0-9a-f]+\.json"),
    "index": re.compile(r"cache\.db(-wal|-shm|-journal)?"),
    "verdicts": re.compile(rf"[^/]+\.json{_PART}"),
}
"""Which files of a store's folders are its own, by their paths inside the folder."""
FILES_BESIDE = re.compile(
    rf"(store\.json|profile\.json|costs-[0-9a-f]+\.json|sources\.db(\.damaged)?(-wal|-shm|-journal)?){_PART}"
)
"""Which files beside the folders are the store's own."""


class StoreFiles:
    """Names, writes, renames and removes the files of a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects, self.tmp, self.quarantined = folder / "objects", folder / "tmp", folder / "quarantine"

    def create(self) -> None:
        """Create the folders, for their owner only; raises `OSError` if a folder cannot be created."""
        for path in (self.folder, self.objects, self.tmp, self.quarantined, self.folder / "models"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, address: str) -> Path:
        """Return the path of an entry, or raise `ValueError` if this is not an address: it might lead elsewhere."""
        if not ADDRESS.fullmatch(address):
            raise ValueError(f"not an address: {address!r}")
        return self.objects / address[-2:] / f"{address}{ENDING}"

    def size(self, address: str) -> int | None:
        """Return the bytes of an entry's file, or None if there is none."""
        return file_size(self.path(address))

    def new_temporary(self) -> Path:
        """Return a new path to write to; its name says which process writes."""
        return self.tmp / f"{process_namespace()}-{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}"

    def allocate(self, path: Path, size: int) -> None:
        """Create a file of a size that is to be written later; it takes no room on the disk yet."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def write(self, path: Path, parts: Sequence[Buffer]) -> None:
        """Write a new file, or one that was allocated in this size, and force it to disk; if that fails, remove it.

        In as few calls as possible: data written at once is in large pages of the cache, which are mapped faster.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                unwritten = [memoryview(part) for part in parts]
                while unwritten:
                    unwritten = _after(unwritten, os.writev(descriptor, unwritten[:MAX_PARTS_PER_WRITE]))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def publish(self, temporary: Path, address: str) -> None:
        """Give a written file its name; other processes see all of it from then on."""
        path = self.path(address)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.rename(path)

    def remove(self, address: str) -> bool:
        return _unlink(self.path(address))

    def quarantine(self, address: str, reason: str) -> Path | None:
        """Move an entry's file to quarantine, with the reason; return its path, or None if there is no file."""
        target = self.quarantined / f"{address}{ENDING}"
        try:
            self.path(address).rename(target)
        except FileNotFoundError:
            return None
        self.write_json(target.with_suffix(".json"), {"address": address, "reason": reason})
        return target

    def remove_quarantined(self, name: str) -> None:
        """Remove a file from quarantine, and the reason beside it."""
        path = self.quarantined / _inside(name)
        for ending in (ENDING, ".json"):
            _unlink(path.with_suffix(ending))

    def temporary(self, name: str) -> Path:
        return self.tmp / _inside(name)

    def remove_temporary(self, name: str) -> bool:
        return _unlink(self.temporary(name))

    def entries(self) -> Iterator[tuple[str, Path]]:
        """Yield address and path of every entry that has a file; anything else is passed over, see `strays`."""
        for shard in _listed(self.objects):
            if SHARD.fullmatch(shard.name) and shard.is_dir():
                for file in _listed(Path(shard.path)):
                    if _is_entry(file) and file.name.endswith(f"{shard.name}{ENDING}"):
                        yield file.name.removesuffix(ENDING), Path(file.path)

    def temporaries(self) -> Iterator[Path]:
        """Yield the path of every file that is being written, or was when its writer died."""
        return (Path(file.path) for file in _listed(self.tmp) if file.name.endswith(TEMPORARY) and file.is_file())

    def quarantined_entries(self) -> Iterator[Path]:
        """Yield the path of every damaged entry in quarantine."""
        return (Path(file.path) for file in _listed(self.quarantined) if _is_entry(file))

    def strays(self) -> Iterator[Path]:
        """Yield every file among entries and temporary files that this library did not write; it is left alone."""
        entries = {path for _, path in self.entries()}
        for top in (self.objects, self.tmp, self.quarantined):
            for root, _, names in os.walk(top):
                for path in (Path(root, name) for name in names):
                    own = FOLDERS[top.name].fullmatch(path.relative_to(top).as_posix())
                    if not own or (top == self.objects and path not in entries):
                        yield path

    def is_abandoned(self, temporary: str) -> bool:
        """Return whether the process that wrote a temporary file ran on this machine and has ended."""
        namespace, _, pid = temporary.rpartition("-")[0].rpartition("-")
        return pid.isdigit() and process_has_ended(namespace, int(pid))

    def write_json(self, path: Path, data: dict[str, Any]) -> None:
        """Write a small file atomically."""
        temporary = self.new_temporary()
        self.write(temporary, [json.dumps(data, indent=2).encode()])
        temporary.rename(path)


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


def file_size(path: Path) -> int | None:
    """Return the bytes of a regular file; None if there is none, or something else in its place."""
    with suppress(FileNotFoundError, NotADirectoryError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def _inside(name: str) -> str:
    if "/" in name:
        raise CorruptEntry(f"the index names {name!r}, not a file of this store")
    return name


def _is_entry(file: os.DirEntry[str]) -> bool:
    name = file.name
    return name.endswith(ENDING) and bool(ADDRESS.fullmatch(name.removesuffix(ENDING))) and file.is_file()


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as files:
            return list(files)
    except FileNotFoundError:
        return []


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _after(parts: list[memoryview], written: int) -> list[memoryview]:
    """Return the rest of some parts after their first bytes were written."""
    for index, part in enumerate(parts):
        if written < len(part):
            return [part[written:], *parts[index + 1 :]]
        written -= len(part)
    return []
