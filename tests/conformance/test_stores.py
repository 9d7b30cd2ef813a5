"""Every store does what the contract says, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, KVStore, MemoryStore, TieredStore
from qcfuse_rag.store.backends.tenant import TenantStore
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import KVStoreTests

MIB = 1 << 20
SECRET = bytes(range(32))


Open = Callable[[Path], KVStore]
STORES: dict[str, Open] = {
    "memory": lambda folder: MemoryStore(MIB),
    "disk": lambda folder: DiskStore(folder, 8 * MIB),
    "disk, int8": lambda folder: DiskStore(folder, 8 * MIB, kv_dtype="int8", eviction="lru"),
    "encrypted disk": lambda folder: DiskStore(folder, 8 * MIB, cipher=StoreCipher(SECRET)),
    "memory over disk": lambda folder: TieredStore(MemoryStore(MIB), DiskStore(folder, 8 * MIB)),
    "too small a memory over disk": lambda folder: TieredStore(MemoryStore(10), DiskStore(folder, 8 * MIB)),
    "memory over disk, int8": lambda folder: TieredStore(
        MemoryStore(MIB, kv_dtype="int8"), DiskStore(folder, 8 * MIB, kv_dtype="int8")
    ),
    "three tiers": lambda folder: TieredStore(  # the third stands for a store on another machine
        MemoryStore(MIB),
        TieredStore(DiskStore(folder, 8 * MIB), MemoryStore(8 * MIB)),
    ),
    "tenant over disk": lambda folder: TenantStore(DiskStore(folder, 8 * MIB), "alice", SECRET),
}


class TestStores(KVStoreTests):
    @pytest.fixture(params=STORES.values(), ids=STORES)
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
        with request.param(tmp_path / "kv") as store:
            yield store
