"""File systems that behave like others', failures included."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any, ClassVar

from fsspec import register_implementation
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem


class Cloud(AsyncFileSystem):
    """A bucket that is asked asynchronously and copies what it moves, as those of the large providers are."""

    objects: ClassVar[dict[str, bytes]] = {}
    delay_s: ClassVar[float] = 0.0

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        await asyncio.sleep(self.delay_s)
        return self.objects[self._found(path)]

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.objects[self._strip_protocol(path)] = value

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": self._found(path), "size": len(self.objects[self._found(path)]), "type": "file"}

    async def _rm_file(self, path: str, **options: Any) -> None:
        self.objects.pop(self._strip_protocol(path), None)

    async def _cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.objects[self._strip_protocol(path2)] = self.objects[self._found(path1)]

    async def _ls(self, path: str, detail: bool = True, **options: Any) -> list[dict[str, Any]]:
        start = self._strip_protocol(path) + "/"
        return [await self._info(p) for p in list(self.objects) if p.startswith(start) and "/" not in p[len(start) :]]

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        return

    def _found(self, path: str) -> str:
        if self._strip_protocol(path) not in self.objects:
            raise FileNotFoundError(path)
        return str(self._strip_protocol(path))


class WholeCloud(Cloud):
    """Under a protocol known to show objects whole."""

    protocol = "gs"


class OtherCloud(Cloud):
    """Under one that is not."""

    protocol = "cloud"


class Away(MemoryFileSystem):
    """A remote that can go away; a connection that saw it go stays dead, as those over SSH do."""

    protocol = "away"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    down: ClassVar[bool] = False
    connections: ClassVar[int] = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        type(self).connections += 1
        self.dead = False
        self._check()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("away://")))

    def _check(self) -> None:
        self.dead |= self.down
        if self.dead:
            raise RuntimeError("no route to host")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._check()
        return bytes(super().cat_file(path, start, end, **options))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._check()
        return dict(super().info(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self._check()
        return list(super().ls(path, detail, **options))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._check()
        super().makedirs(path, exist_ok)


class Torn(LocalFileSystem):
    """A disk that is full in the middle of every file."""

    protocol = "torn"
    seen: ClassVar[list[str]] = []

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        Path(path).write_bytes(value[: len(value) // 2])
        self.seen.extend(p.name for p in Path(path).parent.parent.glob("*.kv"))
        raise OSError(errno.ENOSPC, "No space left on device")


class Stubborn(LocalFileSystem):
    """A share where a file does not take the name of another, as over SMB."""

    protocol = "stubborn"

    def mv(self, path1: str, path2: str, recursive: bool = True, **options: Any) -> None:
        if Path(path2).exists():
            raise FileExistsError(errno.EEXIST, "File exists", path2)
        super().mv(path1, path2, recursive, **options)


for system in (WholeCloud, OtherCloud, Away, Torn, Stubborn):
    register_implementation(str(system.protocol), system, clobber=True)
