"""A store on another machine, shared by several; while it cannot be reached, every chunk is a miss."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import EntryInfo, EntryStore, Health, Miss, StoreStats
from qcfuse_rag.store.chunk import ChunkKV, to_store_format
from qcfuse_rag.store.entry.codec import Buffer, BytesInMemory, EntryBytes, encode
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.key import ChunkKey, address_of
from qcfuse_rag.store.quantization import LOSSLESS, check_kv_dtype


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
        """Write a blob atomically, replacing one of that name: even if the writer dies, no reader sees a part of it."""

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
        """Close connections, but for those that other threads use; a request after that connects again."""


ENDING = ".kv"
QUARANTINE = "quarantine"
MOST_ASKED = 500  # addresses; for more, all entries are listed: a thousand names come in one answer
MOST_THREADS = 64  # requests without an answer, those included that nobody waits for any more
ANSWER_S, LISTING_S = 20.0, 600.0
"""Most seconds for a whole answer and a whole listing, however slowly it comes; clients' own timeouts are for a packet.
"""
UPLOAD_BYTES_S = 1 << 20
"""Slowest upload that is waited for."""
SECRET_PARAMETER = re.compile("password|secret|token|key|sig", re.IGNORECASE)
"""Names of a URL's parameters that may hold secrets."""
Result = TypeVar("Result")


class RemoteStore(EntryStore):
    """Keeps chunks as blobs: `<address>.kv`, and damaged ones in `quarantine/`.

    After a failure to reach the remote, requests to it are paused, so that a request with ten chunks waits once and not
    ten times. After the pause one caller tries again; until it succeeds, the others get misses at once. The remote
    itself decides how much it holds and what it evicts.

    Args:
        blobs: the remote, see `store.backends.fsspec_blobs` and `store.backends.redis_blobs`.
        kv_dtype, ttl_s: see `KVStore`.
        cipher: the cipher that encrypts entries. All who share the remote need the same secret: an entry under another
            secret is a miss, and an entry written over it is a miss to the others.
        pause_s: seconds for which requests are paused after a failure to reach the remote.

    Raises:
        ValueError: if there is no such format.
    """

    def __init__(
        self,
        blobs: BlobStore,
        *,
        kv_dtype: str = LOSSLESS,
        ttl_s: float | None = None,
        cipher: StoreCipher | None = None,
        pause_s: float = 30.0,
    ) -> None:
        check_kv_dtype(kv_dtype)
        self.kv_dtype = kv_dtype
        self.kind = f"remote {blobs.kind}"
        super().__init__(cipher)
        self._blobs, self.ttl_s, self._pause_s = blobs, ttl_s, pause_s
        self._failure, self._paused_until = "", 0.0
        self._threads = threading.Semaphore(MOST_THREADS)

    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        """Write the chunk; it can be read only once all of it is written."""
        converted = to_store_format(chunk, self.kv_dtype).with_ttl(self.ttl_s)
        parts = encode(key, converted, cipher=self.cipher)
        ttl_s = None if converted.expires is None else max(converted.expires - time.time(), 0.001)
        limit_s = ANSWER_S + sum(map(len, parts)) / UPLOAD_BYTES_S
        undo = partial(self._blobs.delete, _name(key))  # or a passage that was forgotten meanwhile would come back
        self._ask(lambda: self._blobs.write(_name(key), parts, ttl_s), limit_s=limit_s, undo=undo)

    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        """Remove an entry and its copy in quarantine; a damaged entry is moved there.

        Returns False if the remote cannot be reached.
        """
        quarantined = f"{QUARANTINE}/{_name(key)}"
        try:
            if reason is None:  # the quarantine first: once the entry is gone, removal is not tried again
                self._ask(lambda: self._blobs.delete(quarantined))
                return self._ask(lambda: self._blobs.delete(_name(key)))
            renamed = self._ask(lambda: self._blobs.rename(_name(key), quarantined))
        except StoreError:
            return False
        self._count("discarded", renamed)
        return renamed

    def __contains__(self, key: ChunkKey | str) -> bool:
        try:
            return self._has(address_of(key))
        except StoreError:
            return False

    def stored(self, addresses: set[str]) -> set[str]:
        if len(addresses) > MOST_ASKED and (self.ttl_s is None or self._blobs.removes_expired):
            return addresses.intersection(entry.address for entry in self.entries())
        return set(filter(self._has, addresses))

    def _has(self, address: str) -> bool:
        exists = self._ask(lambda: self._blobs.exists(_name(address)))
        if not exists or self.ttl_s is None or self._blobs.removes_expired:
            return exists
        return not isinstance(self.open(address), Miss)  # its expiry is in its header

    def entries(self) -> Iterator[EntryInfo]:
        """Yield address and size of every entry; nothing more is known without reading them."""
        for name, size in self._listed():
            if name.endswith(ENDING):
                yield EntryInfo(name.removesuffix(ENDING), size)

    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        """Return whether there is such an entry; nothing is pinned: a remote evicts by its own rules."""
        return key in self

    def stats(self) -> list[StoreStats]:
        """Return contents and counters. All entries are listed for it; expired ones count until they are removed."""
        sizes = [entry.size_bytes for entry in self.entries()]
        total = sum(sizes) + sum(size for _, size in self._listed(QUARANTINE))
        return [StoreStats(self.kind, len(sizes), total, None, **self._counts)]

    def health(self) -> list[Health]:
        """Write, read and remove a blob, even during a pause; if that works, the pause ends."""
        name, written = f"health-{secrets.token_hex(8)}.probe", secrets.token_bytes(32)
        problems = []

        def same() -> bool:
            self._blobs.write(name, [written], 60.0)
            found = self._blobs.read(name)
            self._blobs.delete(name)
            return found == written

        try:
            if not self._within(same):
                problems.append("does not return what was written; is it full, or is there a proxy in between?")
        except Exception as error:
            problems.append(f"{self._describe(error)}; check its address, the credentials and the network")
        else:
            self._resume()
        return [Health(self.kind, not problems, tuple(problems))]

    def clear(self) -> int:
        """Remove every entry and the quarantine; return how many entries there were."""
        quarantined, names = self._listed(QUARANTINE), [_name(entry.address) for entry in self.entries()]
        removed = [self._ask(partial(self._blobs.delete, name)) for name in [*dict(quarantined), *names]]
        return sum(removed[len(quarantined) :])

    def close(self) -> None:
        self._blobs.close()

    def _read(self, address: str) -> EntryBytes:
        data = self._ask(lambda: self._blobs.read(_name(address)))
        if data is None:
            raise FileNotFoundError(address)
        return BytesInMemory(data)

    def _listed(self, folder: str = "") -> list[tuple[str, int]]:
        return self._ask(lambda: list(self._blobs.names(folder)), limit_s=LISTING_S)

    def _ask(
        self, request: Callable[[], Result], *, limit_s: float | None = None, undo: Callable[[], object] | None = None
    ) -> Result:
        """Send a request to the remote, unless requests are paused."""
        with self._lock:
            if time.monotonic() < self._paused_until:
                raise StoreError(self._failure)
            if self._failure:  # after the pause, this caller tries again; the others do not wait for it
                self._paused_until = time.monotonic() + self._pause_s
        try:
            result = self._within(request, limit_s=limit_s, undo=undo)
        except Exception as error:
            raise StoreError(self._describe(error)) from error
        if self._failure:
            self._resume()
        return result

    def _within(
        self, request: Callable[[], Result], *, limit_s: float | None = None, undo: Callable[[], object] | None = None
    ) -> Result:
        """Send a request in a thread, left alone when the time is over; `undo` takes back what it does then."""
        limit_s, done = limit_s or ANSWER_S, Future[Result]()
        if not self._threads.acquire(blocking=False):
            raise TimeoutError(f"{MOST_THREADS} earlier requests have no answer yet")

        def work() -> None:
            try:
                result = request()
                try:
                    done.set_result(result)
                except InvalidStateError:  # too late
                    if undo is not None:
                        undo()
            except BaseException as error:
                with suppress(InvalidStateError):
                    done.set_exception(error)
            finally:
                self._threads.release()

        try:
            threading.Thread(target=work, name="qcfuse-remote", daemon=True).start()
        except BaseException:
            self._threads.release()
            raise
        if not wait([done], limit_s).done:
            with suppress(InvalidStateError):  # done just now
                done.set_exception(TimeoutError(f"no whole answer in {limit_s:g} s"))
                self._blobs.close()  # the next request connects again
        return done.result()

    def _describe(self, error: Exception) -> str:
        """Return the reason of an error, and pause requests if the remote cannot be reached at all."""
        late = isinstance(error, TimeoutError)
        message = str(error) or ("no answer in time" if late else type(error).__name__)
        if late or not self._answers():
            failure = f"{self.kind} cannot be reached: {message}"
            with self._lock:
                self._failure, self._paused_until = failure, time.monotonic() + self._pause_s
            return failure
        self._resume()
        return f"{self.kind} failed: {message}"

    def _answers(self) -> bool:
        try:
            self._within(lambda: self._blobs.exists("health"))
        except Exception:
            return False
        return True

    def _resume(self) -> None:
        with self._lock:
            self._failure, self._paused_until = "", 0.0


def open_remote(url: str, **options: Any) -> RemoteStore:
    """Open a store on a remote, which is connected to at first use; see `open_blobs` and `RemoteStore`."""
    return RemoteStore(open_blobs(url), **options)


def open_blobs(url: str) -> BlobStore:
    """Return the blobs of a remote, which is connected to at first use.

    Args:
        url: of a Redis or Valkey server (`redis://`, `rediss://`, `unix://`), else of a bucket or folder, see
            `FsspecBlobs`.

    Raises:
        StoreError: if the library for such a URL is not installed, or there is none; for chained URLs and references,
            by which whoever writes the settings of a store could have any file read.
    """
    from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
    from qcfuse_rag.store.backends.redis_blobs import RedisBlobs

    if url.startswith(("redis://", "rediss://", "unix://")):
        return RedisBlobs(url)
    if "::" in url or url.partition(":")[0].lower() == "reference":
        raise StoreError(f"{url_without_secrets(url)!r} is chained or a reference; name the bucket or folder itself")
    return FsspecBlobs(url)


def url_without_secrets(url: str) -> str:
    """Return a URL without password and secret parameters, to be kept with a store; a folder becomes absolute."""
    if url and "://" not in url:
        return str(Path(url).expanduser().absolute())
    scheme, rest = url.split("://", 1) if url else ("", "")
    host, slash, path = rest.partition("/")
    user, at, machine = host.rpartition("@")
    if at:
        host = f"{user.partition(':')[0]}@{machine}".removeprefix("@")
    location, _, query = f"{host}{slash}{path}".partition("?")
    parameters = [text for text in query.split("&") if text and not SECRET_PARAMETER.search(text.partition("=")[0])]
    return f"{scheme}://{location}{'?' * bool(parameters)}{'&'.join(parameters)}" if url else ""


def _name(key: ChunkKey | str) -> str:
    return f"{address_of(key)}{ENDING}"
