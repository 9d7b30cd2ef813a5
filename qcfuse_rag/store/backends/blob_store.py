"""The interface of a remote that keeps chunks: bytes by name, and no more than that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from qcfuse_rag.store.entry.codec import Buffer


class BlobStore(Protocol):
    """Bytes by name, in a bucket, on a server or in a shared folder. Safe to use from several threads.

    Names are letters, digits, dots and dashes, after at most one folder and a slash. Every method may raise whatever a
    client library raises; `RemoteStore` turns it into misses and `StoreError`s. After a `TimeoutError` it pauses at
    once; after any other error it first checks whether the remote answers at all.

    Attributes:
        kind: name for reports, in one word.
        removes_expired: whether the remote removes blobs by itself when they expire.
    """

    kind: str
    removes_expired: bool

    def read(self, name: str) -> bytes | None:
        """Return a blob, or None if there is none."""

    def write(self, name: str, parts: Sequence[Buffer], ttl_s: float | None = None) -> None:
        """Write a blob atomically, replacing one of that name: even if the writer dies, no reader sees a part of it.

        Args:
            name: of the blob.
            parts: its bytes, to be joined.
            ttl_s: seconds after which it may be removed, more than 0; a remote that cannot expire blobs keeps it.
        """

    def delete(self, name: str) -> bool:
        """Remove a blob; return whether there was one."""

    def exists(self, name: str) -> bool:
        """Return whether there is a blob of that name."""

    def names(self, folder: str = "") -> Iterator[tuple[str, int]]:
        """Yield name and size in bytes of the blobs in a folder, without subfolders.

        Unfinished writes are not blobs, whether their writers live or died.
        """

    def rename(self, name: str, new: str) -> bool:
        """Rename a blob; return whether there was one."""

    def close(self) -> None:
        """Close connections."""
