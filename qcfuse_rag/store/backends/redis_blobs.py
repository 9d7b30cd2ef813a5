"""Blobs in Redis or Valkey, which keep them in memory and evict them by their own rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.entry.codec import Buffer

SCAN_BATCH = 1000


class RedisBlobs:
    """Blobs as strings of one server, connected to at first use.

    Set a limit and a policy that evicts on the server: `maxmemory`, and `maxmemory-policy allkeys-lru` or another. A
    string can have 512 MB unless `proto-max-bulk-len` says otherwise.

    Args:
        url: `redis://host:6379/0`, `rediss://` for TLS, or `unix:///path/to/socket`, with user and password if needed.
        prefix: beginning of its keys.
        timeout_s: seconds to wait for a connection, and for each answer after that.

    Raises:
        StoreError: if redis-py is not installed, or the URL is not of this form.
    """

    kind = "redis"
    removes_expired = True

    def __init__(self, url: str, prefix: str = "qcfuse:", *, timeout_s: float = 5.0) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise StoreError("a Redis server needs `pip install 'qcfuse-rag[redis]'`") from error
        # Retried once at once, since the server may have closed an idle connection; timeouts are not retried.
        retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))
        try:
            self._client = redis.Redis.from_url(
                url, socket_connect_timeout=timeout_s, socket_timeout=timeout_s, retry=retry
            )
        except ValueError as error:
            raise StoreError("a Redis URL begins with redis://, rediss:// or unix://, then host or path") from error
        self._prefix = prefix

    def read(self, name: str) -> bytes | None:
        data = self._client.get(self._prefix + name)
        if data is not None and not isinstance(data, bytes):
            raise TypeError(
                f"the answer is a {type(data).__name__} instead of bytes; no URL may ask for decode_responses"
            )
        return data

    def write(self, name: str, parts: Sequence[Buffer], ttl_s: float | None = None) -> None:
        lifetime_ms = None if ttl_s is None else math.ceil(ttl_s * 1000)
        self._client.set(self._prefix + name, b"".join(parts), px=lifetime_ms)

    def delete(self, name: str) -> bool:
        return self._client.unlink(self._prefix + name) > 0

    def exists(self, name: str) -> bool:
        return self._client.exists(self._prefix + name) > 0

    def names(self, folder: str = "") -> Iterator[tuple[str, int]]:
        """Yield name and size of the blobs in a folder; the server scans all its keys for that, in batches."""
        start = f"{self._prefix}{folder}/" if folder else self._prefix
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", start) + "*"
        seen: set[bytes] = set()
        keys = self._client.scan_iter(pattern, SCAN_BATCH, "string")
        while batch := list(islice(keys, SCAN_BATCH)):
            new = [key for key in dict.fromkeys(batch) if key not in seen and b"/" not in key[len(start.encode()) :]]
            seen.update(new)
            with self._client.pipeline(transaction=False) as pipeline:
                for key in new:
                    pipeline.strlen(key)
                sizes = pipeline.execute()
            for key, size in zip(new, sizes, strict=True):
                yield key.decode()[len(self._prefix) :], size

    def rename(self, name: str, new: str) -> bool:
        """Rename a blob; its expiry stays."""
        from redis import ResponseError

        try:
            return bool(self._client.rename(self._prefix + name, self._prefix + new))
        except ResponseError as error:
            if "no such key" not in str(error).lower():
                raise
            return False

    def close(self) -> None:
        self._client.connection_pool.disconnect(inuse_connections=False)  # the others end with their requests
