"""A store on another machine, which several share; it may be slow or away, and then every chunk is a miss."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from qcfuse_rag.errors import CorruptEntry, ForeignEntry, StoreError
from qcfuse_rag.store.backends.base import EntryInfo, Health, KVStore, Miss, StoreStats
from qcfuse_rag.store.backends.blob_store import BlobStore
from qcfuse_rag.store.chunk import ChunkKV, to_store_format
from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.entry.reader import MemorySource, check_key, open_chunk
from qcfuse_rag.store.key import ChunkKey, address_of
from qcfuse_rag.store.quantization import LOSSLESS, check_numbers

ENDING = ".kv"
QUARANTINE = "quarantine"
SECRET_PARAMETER = re.compile("password|secret|token|key|sig", re.IGNORECASE)
"""In the names of a URL's parameters."""
Answer = TypeVar("Answer")


class RemoteStore(KVStore):
    """Keeps chunks as blobs: `<address>.kv`, and in `quarantine/` those that were found damaged.

    A remote that cannot be reached is left alone for a while, so that a request with ten chunks waits once and not ten
    times; then one caller tries again, and the others go on without until it has succeeded. How much a remote holds,
    and what it evicts, is for the remote to decide.

    Args:
        blobs: the remote, see `store.backends.fsspec_blobs` and `store.backends.redis_blobs`.
        numbers: format of new entries, see `store.quantization`.
        ttl_s: seconds after which new entries are gone.
        seal: encrypts entries. All who share the remote need the same one: an entry under another secret is a miss, and
            one that is written over it is a miss to the others.
        rest_s: seconds for which a remote that could not be reached is left alone.

    Raises:
        ValueError: if there is no such format.
    """

    def __init__(
        self,
        blobs: BlobStore,
        *,
        numbers: str = LOSSLESS,
        ttl_s: float | None = None,
        seal: StoreCipher | None = None,
        rest_s: float = 30.0,
    ) -> None:
        check_numbers(numbers)
        self.numbers = numbers
        self.kind = f"remote {blobs.kind}"
        self._blobs, self.ttl_s, self._seal, self._rest_s = blobs, ttl_s, seal, rest_s
        self._trouble, self._resting_until = "", 0.0
        self._counts = {"hits": 0, "misses": 0, "discarded": 0}
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk, fetched whole and its blocks checked when they are used, or why there is none."""
        found = self._open(key.address, key)
        self._count("misses" if isinstance(found, Miss) else "hits")
        return found if isinstance(found, Miss) else found[1]

    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        """Return an entry with its key."""
        return self._open(address, None)

    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        """Write the chunk; it can be found only once all of it is there."""
        lasting = to_store_format(chunk, self.numbers).with_ttl(self.ttl_s)
        parts = encode(key, lasting, seal=self._seal)
        left_s = None if lasting.expires is None else max(lasting.expires - time.time(), 0.001)
        self._ask(lambda: self._blobs.write(_name(key), parts, left_s))

    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        """Remove an entry, and what is in quarantine of it; one that was found damaged goes there.

        False if the remote cannot be reached.
        """
        hidden = f"{QUARANTINE}/{_name(key)}"
        try:
            if reason is None:
                self._delete(hidden)  # first: who finds the entry gone does not try again
                return self._delete(_name(key))
            found = self._ask(lambda: self._blobs.rename(_name(key), hidden))
        except StoreError:
            return False
        self._count("discarded", found)
        return found

    def __contains__(self, key: ChunkKey | str) -> bool:
        try:
            return self._ask(lambda: self._blobs.exists(_name(key)))
        except StoreError:
            return False

    def entries(self) -> Iterator[EntryInfo]:
        """Yield address and size of every entry; nothing more is known without reading them.

        Raises:
            StoreError: if the remote cannot be reached.
        """
        for name, size in self._listed():
            if name.endswith(ENDING):
                yield EntryInfo(name.removesuffix(ENDING), size)

    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        """Return whether there is such an entry, and change nothing: a remote evicts by its own rules, or never."""
        return key in self

    def stats(self) -> list[StoreStats]:
        """Return contents, for which all of it is listed, and counters; entries that expired count until removed.

        Raises:
            StoreError: if the remote cannot be reached.
        """
        sizes = [entry.size_bytes for entry in self.entries()]
        total = sum(sizes) + sum(size for _, size in self._listed(QUARANTINE))
        return [StoreStats(self.kind, len(sizes), total, None, **self._counts)]

    def health(self) -> list[Health]:
        """Write, read and remove something, even if the remote is being left alone; if that works, it no longer is."""
        name, written = f"health-{secrets.token_hex(8)}.probe", secrets.token_bytes(32)
        problems = []
        try:
            self._blobs.write(name, [written], 60.0)
            if self._blobs.read(name) != written:
                problems.append("does not give back what it was given; is it full, or is there a proxy in between?")
            self._blobs.delete(name)
        except Exception as error:
            problems.append(f"{self._describe(error)}; check its address, the credentials and the network")
        else:
            self._leave_alone(None)
        return [Health(self.kind, not problems, tuple(problems))]

    def clear(self) -> int:
        """Remove every entry, and what is in quarantine; return how many entries that was.

        Raises:
            StoreError: if the remote cannot be reached.
        """
        for name, _ in self._listed(QUARANTINE):
            self._delete(name)
        return sum(self._delete(_name(entry.address)) for entry in list(self.entries()))

    def close(self) -> None:
        """Let go of connections."""
        self._blobs.close()

    def _open(self, address: str, key: ChunkKey | None) -> tuple[ChunkKey, ChunkKV] | Miss:
        try:
            data = self._ask(lambda: self._blobs.read(_name(address)))
        except StoreError as error:
            return Miss(str(error))
        if data is None:
            return Miss("absent")
        try:
            header, chunk = open_chunk(MemorySource(data), self._seal)
            check_key(header.key, key, address)
        except ForeignEntry as error:
            return Miss(str(error))
        except (CorruptEntry, ValueError) as error:
            self.discard(address, reason=str(error))
            return Miss(str(error))
        if chunk.expired:
            self.discard(address)
            return Miss("expired")
        return header.key, chunk

    def _listed(self, folder: str = "") -> list[tuple[str, int]]:
        return self._ask(lambda: list(self._blobs.names(folder)))

    def _delete(self, name: str) -> bool:
        return self._ask(lambda: self._blobs.delete(name))

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """Ask the remote, unless it is being left alone.

        Raises:
            StoreError: with what is the matter, whatever a client library raised.
        """
        with self._lock:
            if time.monotonic() < self._resting_until:
                raise StoreError(self._trouble)
            if self._trouble:  # this caller tries whether it is back, the others do not wait for that
                self._resting_until = time.monotonic() + self._rest_s
        try:
            answer = question()
        except Exception as error:
            raise StoreError(self._describe(error)) from error
        if self._trouble:
            self._leave_alone(None)
        return answer

    def _describe(self, error: Exception) -> str:
        """Say what an error means: is it the remote's, which is then left alone, or that of one blob?"""
        late = isinstance(error, TimeoutError)
        what = str(error) or ("no answer in time" if late else type(error).__name__)
        if late or not self._answers():
            trouble = f"{self.kind} cannot be reached: {what}"
            self._leave_alone(trouble)
            return trouble
        self._leave_alone(None)
        return f"{self.kind} failed: {what}"

    def _answers(self) -> bool:
        try:
            self._blobs.exists("health")
        except Exception:
            return False
        return True

    def _leave_alone(self, trouble: str | None) -> None:
        with self._lock:
            self._trouble = trouble or ""
            self._resting_until = time.monotonic() + self._rest_s if trouble else 0.0

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number


def open_remote(url: str, **options: Any) -> RemoteStore:
    """Open a store on a remote, which is connected to when it is first asked for something.

    Args:
        url: of a Redis or Valkey server (`redis://`, `rediss://`, `unix://`), else of a bucket or folder, see `FsspecBlobs`.
        options: for `RemoteStore`.

    Raises:
        StoreError: if what such a URL needs is not installed.
    """
    from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
    from qcfuse_rag.store.backends.redis_blobs import RedisBlobs

    server = url.startswith(("redis://", "rediss://", "unix://"))
    return RemoteStore(RedisBlobs(url) if server else FsspecBlobs(url), **options)


def url_without_secrets(url: str) -> str:
    """Return a URL as it may be written down for use from elsewhere: without its password, a folder's path whole."""
    if url and "://" not in url:
        return str(Path(url).expanduser().absolute())
    scheme, rest = url.split("://", 1) if url else ("", "")
    host, slash, path = rest.partition("/")
    user, at, machine = host.rpartition("@")
    kept = f"{user.partition(':')[0]}@{machine}".removeprefix("@") if at else host
    place, _, query = f"{kept}{slash}{path}".partition("?")
    safe = "&".join(one for one in query.split("&") if one and not SECRET_PARAMETER.search(one.partition("=")[0]))
    return f"{scheme}://{place}{'?' * bool(safe)}{safe}" if url else ""


def _name(key: ChunkKey | str) -> str:
    return f"{address_of(key)}{ENDING}"
