"""Open the store most programs want: a folder on disk behind a tier in memory."""

from __future__ import annotations

import os
from pathlib import Path

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.backends.disk import DiskStore, read_settings
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.store.backends.remote import RemoteStore, open_blobs
from qcfuse_rag.store.backends.tenant import TenantStore
from qcfuse_rag.store.backends.tiered import TieredStore
from qcfuse_rag.store.entry.encryption import (
    SECRET_VARIABLE,
    TENANT_SECRET_VARIABLE,
    StoreCipher,
    environment_secret,
)
from qcfuse_rag.store.quantization import LOSSLESS

DEFAULT_KV_DTYPE = "int8"
"""Default format of entries on disks and servers: a quarter of float32's bytes and half of bfloat16's."""


def open_store(
    folder: str | Path | None = None,
    *,
    disk_bytes: int | None = None,
    memory_bytes: int = 2 << 30,
    kv_dtype: str | None = None,
    eviction: str | None = None,
    ttl_s: float | None = None,
    secret: bytes | None = None,
    tenant: str | None = None,
    encrypt: bool | None = None,
    remote: str | None = None,
) -> KVStore:
    """Open a store.

    Args:
        folder: of the disk tier; None keeps chunks in memory only, until the process ends.
        disk_bytes: most bytes the folder may take; 64 GiB if never given.
        memory_bytes: most bytes the memory tier may take.
        kv_dtype: format of new entries, `model` or `int8`; see `store.quantization`. A new folder or remote gets
            `int8`, and a store in memory alone the model's own.
        eviction: policy on disk, `cost`, `lru` or `lfu`; see `store.backends.base`.
        ttl_s: seconds after which new entries expire.
        secret: encrypts entries and names tenants; random bytes from configuration, never from a request. By default
            the environment variable QCFUSE_SECRET, if it is set.
        tenant: open this tenant's view, see `store.backends.tenant`.
        encrypt: by default, entries are encrypted if there is a secret. True requires a secret. False uses the secret
            for the names of tenants alone, as QCFUSE_TENANT_SECRET does, and reads and writes plain entries.
        remote: URL of a bucket or server behind the disk, shared by machines, with the same format and secret; see
            `store.backends.remote`. While it cannot be reached, chunks are kept on disk alone. The folder remembers it
            without its password; an empty URL removes it.

    Options that are not given are as the folder was opened before.

    Raises:
        StoreError: if the folder cannot be used, or the secret is missing, too short or not used, or there is a secret
            and the folder's entries are not encrypted, or the other way round.
        ValueError: if there is no such format or policy.
    """
    cipher, tenant_secret = _secrets(secret, tenant, encrypt)
    blobs = open_blobs(remote) if remote else None  # first: the folder keeps the URL
    disk: DiskStore | None = None
    if folder is not None:
        if kv_dtype is None and read_settings(Path(folder).expanduser()) is None:
            kv_dtype = DEFAULT_KV_DTYPE
        disk = DiskStore(
            folder, disk_bytes, kv_dtype=kv_dtype, eviction=eviction, ttl_s=ttl_s, cipher=cipher, remote=remote
        )
        kv_dtype, ttl_s = disk.kv_dtype, disk.ttl_s  # the settings kept in the folder hold for the other tiers too
        if remote is None and disk.settings.remote:
            try:
                blobs = open_blobs(disk.settings.remote)
            except StoreError:
                disk.close()
                raise
    kv_dtype = kv_dtype or (LOSSLESS if blobs is None else DEFAULT_KV_DTYPE)
    store: KVStore = MemoryStore(memory_bytes, kv_dtype=kv_dtype, ttl_s=ttl_s)
    far: KVStore | None = disk
    if blobs is not None:
        far = RemoteStore(blobs, kv_dtype=kv_dtype, ttl_s=ttl_s, cipher=cipher)
        if disk is not None:
            far = TieredStore(disk, far, near_suffices=True)
    if far is not None:
        store = TieredStore(store, far)
    return store if tenant is None or tenant_secret is None else TenantStore(store, tenant, tenant_secret, owned=True)


def _secrets(secret: bytes | None, tenant: str | None, encrypt: bool | None) -> tuple[StoreCipher | None, bytes | None]:
    """Return the cipher of entries and the secret under which tenants are named, or None; see `open_store`."""
    plain_names = None
    if secret is None:
        secret = environment_secret()
        plain_names = os.environ.get(TENANT_SECRET_VARIABLE)
    if encrypt and secret is None:
        raise StoreError(f"encryption needs a secret; give one from your configuration, or set {SECRET_VARIABLE}")
    if encrypt is False and tenant is None and secret is not None:
        raise StoreError("there is a secret and nothing to use it for; leave out the secret, or encrypt=False")
    tenant_secret = secret if secret is not None or plain_names is None else os.fsencode(plain_names)
    if tenant is not None and tenant_secret is None:
        raise StoreError(
            f"a tenant needs a secret; give one from your configuration, or set {SECRET_VARIABLE} (which encrypts) or "
            f"{TENANT_SECRET_VARIABLE} (which does not)"
        )
    return None if secret is None or encrypt is False else StoreCipher(secret), tenant_secret
