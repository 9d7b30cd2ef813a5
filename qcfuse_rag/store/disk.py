"""A store on local disk: one file per chunk, indexed by diskcache, which also evicts and locks between processes.

diskcache by itself pickles what it does not know and unpickles what it finds (CVE-2025-69872). `BytesDisk` takes away
both: keys are strings, values are bytes, and anything else found in the index is an error, never executed.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_BINARY, UNKNOWN

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.contract import KVStore, Miss, StoreStats
from qcfuse_rag.store.format import decode, encode
from qcfuse_rag.store.key import ChunkKey

FAILURES = (OSError, ValueError, diskcache.Timeout, sqlite3.Error, CorruptEntry, StoreError)


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """Serialisation for diskcache that knows strings as keys and bytes as values, and nothing else."""

    def put(self, key: Any) -> tuple[str, bool]:
        """Return a key's form in the index."""
        if not isinstance(key, str):
            raise TypeError(f"keys are strings, got {type(key).__name__}")
        return key, True

    def get(self, key: Any, raw: bool) -> str:
        """Return a key from its form in the index."""
        if not raw or not isinstance(key, str):
            raise CorruptEntry("the index holds a key that is not text; it was not written by this library")
        return key

    def store(self, value: Any, read: bool, key: Any = UNKNOWN) -> tuple[int, int, str, None]:
        """Write a value to a new file and force it to disk; the index names it only afterwards."""
        if not isinstance(value, bytes) or read:
            raise TypeError(f"values are bytes, got {type(value).__name__}")
        name, path = self.filename(key, value)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            Path(path).unlink(missing_ok=True)  # half a file that no index names would never be found again
            raise
        return len(value), MODE_BINARY, name, None

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> memoryview:
        """Read a value's file.

        It is read rather than mapped: a disk error then is an error here and not a signal in the middle of a request.
        diskcache takes an `OSError` for absence, hence the other types.
        """
        if mode != MODE_BINARY or filename is None or read:
            raise CorruptEntry("the index holds a value that is not a file of bytes; it was not read")
        try:
            return memoryview(bytearray(Path(self._directory, filename).read_bytes()))
        except FileNotFoundError as error:
            raise CorruptEntry("its file is missing") from error
        except OSError as error:
            raise StoreError(str(error)) from error


class DiskStore(KVStore):
    """Keeps chunks in a folder, across processes and restarts.

    Args:
        folder: created if it does not exist.
        limit_bytes: size to which least recently used entries are evicted.

    Raises:
        StoreError: if the folder cannot be used.
    """

    def __init__(self, folder: str | Path, limit_bytes: int = 64 << 30) -> None:
        self.folder = Path(folder).expanduser()
        try:
            self._cache = diskcache.Cache(
                str(self.folder), disk=BytesDisk, size_limit=limit_bytes, eviction_policy="least-recently-used"
            )
            self._models = self._known_models()
        except (OSError, sqlite3.Error, diskcache.Timeout, CorruptEntry, TypeError) as error:
            raise StoreError(f"cannot open a store in {self.folder}: {error}") from error
        self._hits = self._misses = self._discarded = 0
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        """Return the chunk, its blocks checked when they are used, or why there is none."""
        try:
            data = self._cache.get(key.address)
            if data is not None:
                chunk = decode(data, key)
                self._count(hit=True)
                return chunk
            reason = self._absence(key)
        except CorruptEntry as error:
            self.discard(key, reason=str(error))
            reason = str(error)
        except FAILURES as error:
            reason = f"cannot be read: {error}"
        self._count(hit=False)
        return Miss(reason)

    def put(self, key: ChunkKey, chunk: ChunkKV) -> None:
        """Write the chunk; it can be found only once it is complete on disk."""
        data = encode(key, chunk)
        if len(data) > self._cache.size_limit:
            raise StoreError(f"a chunk of {len(data):,} bytes does not fit a store of {self._cache.size_limit:,} bytes")
        try:
            self._cache.set(key.address, data, tag="chunk")
            if key.fingerprint.digest not in self._models:
                fields = json.dumps(key.fingerprint.fields()).encode()
                self._cache.set(f"model-{key.fingerprint.digest}", fields, tag="model")
                self._models[key.fingerprint.digest] = key.fingerprint.fields()
        except FAILURES as error:
            raise StoreError(f"cannot write to {self.folder}: {error}") from error

    def discard(self, key: ChunkKey, reason: str | None = None) -> bool:
        """Remove an entry."""
        try:
            found = bool(self._cache.delete(key.address))
        except FAILURES:
            return False
        with self._lock:
            self._discarded += found and reason is not None
        return found

    def __contains__(self, key: ChunkKey) -> bool:
        try:
            return key.address in self._cache
        except FAILURES:
            return False

    def clear(self) -> int:
        """Remove everything."""
        try:
            count = sum(1 for _ in self._addresses())
            self._cache.clear()
        except FAILURES as error:
            raise StoreError(f"cannot clear {self.folder}: {error}") from error
        self._models = {}
        return count

    def stats(self) -> list[StoreStats]:
        """Return contents and counters."""
        try:
            entries, size = sum(1 for _ in self._addresses()), int(self._cache.volume())
        except FAILURES as error:
            raise StoreError(f"cannot read {self.folder}: {error}") from error
        limit = int(self._cache.size_limit)
        return [StoreStats("disk", entries, size, limit, self._hits, self._misses, self._discarded)]

    def close(self) -> None:
        """Close the index."""
        self._cache.close()

    def models(self) -> dict[str, dict[str, str]]:
        """Return the fingerprints of the models whose chunks have been stored here, by digest."""
        return dict(self._models)

    def _absence(self, key: ChunkKey) -> str:
        """Say why an entry is missing: never stored, or stored for another model, and what differs then."""
        if not self._models or key.fingerprint.digest in self._models:
            return "absent"
        differing = min((key.fingerprint.differences(other) for other in self._models.values()), key=len)
        return f"absent: the store holds chunks of another model, {', '.join(differing)} differ"

    def _known_models(self) -> dict[str, dict[str, str]]:
        """Read the records of models; an unreadable one is dropped, since it only serves to explain misses."""
        models = {}
        for name in [name for name in self._cache if name.startswith("model-")]:
            try:
                models[name.removeprefix("model-")] = dict(json.loads(bytes(self._cache[name])))
            except (KeyError, *FAILURES):
                self._cache.delete(name)
        return models

    def _addresses(self) -> Iterator[str]:
        return (name for name in self._cache if not name.startswith("model-"))

    def _count(self, *, hit: bool) -> None:
        with self._lock:
            self._hits += hit
            self._misses += not hit
