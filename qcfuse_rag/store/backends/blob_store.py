"""What a place on another machine must do to keep chunks: bytes by name, and no more than that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from qcfuse_rag.store.entry.codec import Buffer


class BlobStore(Protocol):
    """Bytes under names, kept by a bucket, a server or a shared folder. Safe to use from several threads.

    Names are letters, digits, dots and dashes, with at most one folder and a slash in front. Every method may raise
    whatever a client library raises; `RemoteStore` makes misses and `StoreError`s of it. A `TimeoutError` says that
    nothing else need be asked for now; after any other error it is tried whether the remote answers at all.

    Attributes:
        kind: what it is, in one word, for reports.
    """

    kind: str

    def read(self, name: str) -> bytes | None:
        """Return a blob whole, or None if there is none."""

    def write(self, name: str, parts: Sequence[Buffer], ttl_s: float | None = None) -> None:
        """Write a blob, replacing one of that name. Others see all of it or nothing, even if the writer dies.

        Args:
            name: of the blob.
            parts: its bytes, to be put one behind the other.
            ttl_s: seconds after which it may be removed, more than 0; a remote that cannot do that keeps it.
        """

    def delete(self, name: str) -> bool:
        """Remove a blob; return whether there was one."""

    def exists(self, name: str) -> bool:
        """Return whether there is a blob of that name."""

    def names(self, folder: str = "") -> Iterator[tuple[str, int]]:
        """Yield name and size in bytes of the blobs in a folder, not of those in folders below it.

        What is still being written, or was when its writer died, is not a blob and is not among them.
        """

    def rename(self, name: str, new: str) -> bool:
        """Give a blob another name; return whether there was one."""

    def close(self) -> None:
        """Let go of connections."""
