"""Tenants share a store; each sees only its own entries.

Every key of a tenant contains a token: a keyed hash of the tenant's name (BLAKE2b, RFC 7693) under a secret. The secret
comes from configuration, so that putting a name into a request is not enough to make an address. Equal passages of two
tenants are two entries, so that neither learns from timing what the other has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import EntryInfo, Health, KVStore, Miss, StoreStats
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.encryption import MIN_SECRET_BYTES, PROOF_TEXT
from qcfuse_rag.store.key import ChunkKey, tenant_prefix


class TenantStore(KVStore):
    """A tenant's view of a store.

    Args:
        store, tenant: the store that all tenants share, and the name of one.
        secret: at least 16 random bytes from configuration, the same for all tenants, never from a request.
        owned: whether closing this view closes the store.

    Raises:
        StoreError: if the secret is too short, or the name is reserved.
    """

    def __init__(self, store: KVStore, tenant: str, secret: bytes, *, owned: bool = False) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise StoreError(f"the secret has {len(secret)} bytes; give at least {MIN_SECRET_BYTES} random ones")
        self.store, self.kv_dtype, self.folder, self._closes_store = store, store.kv_dtype, store.folder, owned
        self.kind, self.limit_bytes, self.ttl_s = store.kind, store.limit_bytes, store.ttl_s
        if tenant == PROOF_TEXT:
            raise StoreError(f"no tenant can be called {PROOF_TEXT!r}; give it another name")
        key = hashlib.blake2b(secret, digest_size=64).digest()
        self._token = hashlib.blake2b(tenant.encode(), key=key, digest_size=16).hexdigest()
        self.prefix = tenant_prefix(self._token)

    def address(self, key: ChunkKey | str) -> str:
        return key if isinstance(key, str) else self._with_token(key).address

    @property
    def tiers(self) -> list[KVStore]:
        return self.store.tiers

    def get(self, key: ChunkKey) -> ChunkKV | Miss:
        return self.store.get(self._with_token(key))

    def open(self, address: str) -> tuple[ChunkKey, ChunkKV] | Miss:
        return self.store.open(address) if self._owns(address) else Miss("absent")

    def put(self, key: ChunkKey, chunk: ChunkKV, *, saved_ms: float | None = None) -> None:
        self.store.put(self._with_token(key), chunk, saved_ms=saved_ms)

    def discard(self, key: ChunkKey | str, reason: str | None = None) -> bool:
        address = self.address(key)
        return self._owns(address) and self.store.discard(address, reason)

    def __contains__(self, key: ChunkKey | str) -> bool:
        address = self.address(key)
        return self._owns(address) and address in self.store

    def entries(self) -> Iterator[EntryInfo]:
        return (entry for entry in self.store.entries() if self._owns(entry.address))

    def pin(self, key: ChunkKey | str, *, pinned: bool = True) -> bool:
        address = self.address(key)
        return self._owns(address) and self.store.pin(address, pinned=pinned)

    def stats(self) -> list[StoreStats]:
        """Return the shared store's counters; entries and bytes of the last tier are the tenant's alone."""
        *near, far = self.store.stats()
        sizes = [entry.size_bytes for entry in self.entries()]
        return [*near, replace(far, entries=len(sizes), size_bytes=sum(sizes))]

    def health(self) -> list[Health]:
        return self.store.health()

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        self.store.prefetch([self._with_token(key) for key in keys])

    def flush(self) -> None:
        self.store.flush()

    def close(self) -> None:
        if self._closes_store:
            self.store.close()

    def _with_token(self, key: ChunkKey) -> ChunkKey:
        return key if key.namespace == self._token else replace(key, namespace=self._token)

    def _owns(self, address: str) -> bool:
        return address.startswith(self.prefix)
