"""The files of a store on disk: an entry is one file named after its address, which never changes once it has its name.

`objects/7c/<address>.kv` are entries, in folders by the last two digits; `tmp/` is what is being written; `quarantine/`
what was found damaged, with the reason beside it; `models/<digest>.json` whose chunks are here, to explain misses;
`index/`, `store.json` and `sources.db` belong to `store.backends.disk_index`, `store.backends.disk_settings` and `store.documents.sources`.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.entry.codec import ENCRYPTED, PREAMBLE, Buffer, Preamble

ENDING, TEMPORARY = ".kv", ".part"
MAX_PARTS_PER_WRITE = 1000
"""`writev` takes 1024 on Linux and macOS."""
ADDRESS_CHARACTERS = frozenset("0123456789abcdef-")


class StoreFiles:
    """Names, writes, renames and removes the files of a store.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects, self.tmp, self.quarantined = folder / "objects", folder / "tmp", folder / "quarantine"

    def create(self) -> None:
        """Make the folders, for their owner only."""
        for process_namespace in (self.folder, self.objects, self.tmp, self.quarantined, self.folder / "models"):
            process_namespace.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, address: str) -> Path:
        """Return where an entry is, or would be.

        Raises:
            ValueError: if this is no address, and might lead out of the folder.
        """
        if not set(address) <= ADDRESS_CHARACTERS:
            raise ValueError(f"not an address: {address!r}")
        return self.objects / address[-2:] / f"{address}{ENDING}"

    def new_temporary(self) -> Path:
        """Return a name under which something can be written, which says who is writing."""
        return self.tmp / f"{process_namespace()}-{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}"

    def temporary(self, name: str) -> Path:
        """Return what is being written under a name.

        Raises:
            CorruptEntry: if it is none that this library gives.
        """
        return self.tmp / _checked(name, TEMPORARY)

    def write(self, path: Path, parts: Sequence[Buffer]) -> None:
        """Write a new file and force it to disk.

        In as few calls as can be: what is written at once lies in large pages, which are quickly mapped again.

        Raises:
            OSError: if that fails; nothing is left then.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                left = [memoryview(part) for part in parts]
                while left:
                    left = _after(left, os.writev(descriptor, left[:MAX_PARTS_PER_WRITE]))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def publish(self, temporary: Path, address: str) -> None:
        """Give what was written its name, at once and for all to see."""
        path = self.path(address)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.rename(path)

    def remove(self, address: str) -> bool:
        """Remove an entry's file; return whether there was one."""
        try:
            self.path(address).unlink()
        except FileNotFoundError:
            return False
        return True

    def quarantine(self, address: str, reason: str) -> Path | None:
        """Move an entry's file out of the way for someone to look at; return where, or None if there is no file."""
        target = self.quarantined / f"{address}{ENDING}"
        try:
            self.path(address).rename(target)
        except FileNotFoundError:
            return None
        self.write_json(target.with_suffix(".json"), {"address": address, "reason": reason})
        return target

    def remove_quarantined(self, name: str) -> None:
        """Remove a file from quarantine, and the reason beside it.

        Raises:
            CorruptEntry: if the name is none that this library gives.
        """
        path = self.quarantined / _checked(name, ENDING)
        for ending in (ENDING, ".json"):
            path.with_suffix(ending).unlink(missing_ok=True)

    def entries(self) -> Iterator[tuple[str, Path]]:
        """Yield address and path of every entry that has a file."""
        for path in self.objects.glob(f"??/*{ENDING}"):
            yield path.name.removesuffix(ENDING), path

    def is_abandoned(self, temporary: str) -> bool:
        """Return whether whoever was writing a temporary file, on this machine, is gone."""
        there, _, pid = temporary.rpartition("-")[0].rpartition("-")
        return pid.isdigit() and process_has_ended(there, int(pid))

    def sealed(self) -> bool | None:
        """Return whether entries are encrypted, by one of them that can be read; None if there is none."""
        for _, path in self.entries():
            try:
                with open(path, "rb") as file:
                    return bool(Preamble.read(file.read(PREAMBLE.size)).flags & ENCRYPTED)
            except (OSError, CorruptEntry):
                continue
        return None

    def write_json(self, path: Path, data: dict[str, Any]) -> None:
        """Write a small file, replacing it at once if it exists."""
        temporary = self.new_temporary()
        self.write(temporary, [json.dumps(data, indent=2).encode()])
        temporary.rename(path)


def process_namespace() -> str:
    """Return where this process counts: the machine's name, and which of its process numbers are meant.

    Containers may share a name and a folder and number their processes each for themselves.
    """
    try:
        return f"{platform.node()}.{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:  # elsewhere than on Linux
        return platform.node()


def process_has_ended(there: str, pid: int) -> bool:
    """Return whether a process is over for certain; what goes on in another `process_namespace` is not known."""
    if there != process_namespace():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _checked(name: str, ending: str) -> str:
    """Return the name of a file, unless it might lead out of its folder: whoever can write an index may name anything.

    Raises:
        CorruptEntry: if it might.
    """
    if not name.endswith(ending) or set(name) & {"/", "\\", "\0"}:
        raise CorruptEntry(f"the index names {name!r}, which is no file of this store; `qcfuse store rebuild` mends it")
    return name


def _after(parts: list[memoryview], written: int) -> list[memoryview]:
    """Return what is left of parts of which the first bytes are written."""
    for index, part in enumerate(parts):
        if written < len(part):
            return [part[written:], *parts[index + 1 :]]
        written -= len(part)
    return []
