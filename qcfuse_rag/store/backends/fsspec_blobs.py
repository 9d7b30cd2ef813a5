"""Blobs in a bucket or a shared folder, by fsspec: S3, Google Cloud Storage, SFTP, NFS and others."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.entry.codec import Buffer

ATOMIC_PROTOCOLS = frozenset({"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols that show an object only once all of it is written."""


class FsspecBlobs:
    """Blobs under a URL, connected to at first use.

    A bucket keeps expired entries until they are asked for, and files of dead writers in `tmp/`: give it a lifecycle
    rule that removes old objects. Files of a shared folder get the permissions of the umask and are not forced to
    disk: a file torn by a power cut is found damaged and stored again.

    Args:
        url: such as `s3://bucket/folder`, `gs://bucket/folder`, `sftp://host/folder` or `file:///mnt/shared/folder`.

    Raises:
        StoreError: if fsspec, or the library it needs for such a URL, is not installed.
    """

    removes_expired = False

    def __init__(self, url: str) -> None:
        try:
            from fsspec import get_filesystem_class
            from fsspec.asyn import AsyncFileSystem
            from fsspec.core import split_protocol
        except ImportError as error:
            raise StoreError("a bucket needs `pip install 'qcfuse-rag[remote]'`") from error
        self.kind: str = split_protocol(url)[0] or "file"
        try:
            system = get_filesystem_class(self.kind)
        except (ImportError, ValueError) as error:
            raise StoreError(f"cannot use URLs that begin with {self.kind}://: {error}") from error
        self._root = str(system._strip_protocol(url)).rstrip("/")
        self._asynchronous = issubclass(system, AsyncFileSystem)
        self._url = url
        self._system: Any = None

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._ask("cat_file", self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, parts: Sequence[Buffer], ttl_s: float | None = None) -> None:
        """Write a blob: under its name if the protocol is atomic, else under a temporary name first."""
        data = b"".join(parts)
        if self.kind in ATOMIC_PROTOCOLS:
            self._ask("pipe_file", self._path(name), data)
            return
        temporary = f"tmp/{secrets.token_hex(16)}.part"
        self._make_folder(temporary)
        try:
            self._ask("pipe_file", self._path(temporary), data)
            self._move(temporary, name)
        except BaseException:
            with suppress(Exception):
                self._ask("rm_file", self._path(temporary))
            raise

    def delete(self, name: str) -> bool:
        """Remove a blob; it is looked up first, since object stores do not say whether there was one."""
        try:
            if exists := self.exists(name):
                self._ask("rm_file", self._path(name))
        except FileNotFoundError:
            return False
        return exists

    def exists(self, name: str) -> bool:
        """Return whether there is such a blob, ignoring fsspec's cached listings."""
        try:
            return bool(self._ask("info", self._path(name), fresh=True)["type"] == "file")
        except FileNotFoundError:
            return False

    def names(self, folder: str = "") -> Iterator[tuple[str, int]]:
        try:
            listing = self._ask("ls", self._path(folder), fresh=True, detail=True)
        except FileNotFoundError:
            return
        for item in listing:
            if item["type"] == "file":
                name = str(item["name"]).rpartition("/")[2]
                yield (f"{folder}/{name}" if folder else name), int(item["size"])

    def rename(self, name: str, new: str) -> bool:
        """Rename a blob; object stores copy it."""
        try:
            if self.kind not in ATOMIC_PROTOCOLS:
                self._make_folder(new)
            self._move(name, new)
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Drop the connection, which fsspec closes when it is unused."""
        self._system = None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_folder(self, name: str) -> None:
        self._ask("makedirs", self._path(name).rpartition("/")[0], exist_ok=True)

    def _move(self, name: str, new: str) -> None:
        old_path, new_path = self._path(name), self._path(new)
        if self._asynchronous:
            self._ask("cp_file", old_path, new_path)
            self._ask("rm_file", old_path)
            return
        try:
            self._ask("mv", old_path, new_path)
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise
            self._ask("rm_file", new_path)  # SMB does not replace files
            self._ask("mv", old_path, new_path)

    def _ask(self, method: str, *arguments: Any, fresh: bool = False, **options: Any) -> Any:
        """Call a method of the file system; reconnect after a failure, since not every protocol does so itself."""
        from fsspec.core import url_to_fs

        try:
            system = self._system
            if system is None:
                system = self._system = url_to_fs(self._url, skip_instance_cache=True)[0]
            if fresh:
                system.invalidate_cache()
            return getattr(system, method)(*arguments, **options)
        except FileNotFoundError:
            raise
        except BaseException:
            self._system = None
            raise
