"""Every store does what the contract says, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, KVStore, MemoryStore, TieredStore
from qcfuse_rag.store.backends.tenant import TenantStore
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import KVStoreTests

MIB = 1 << 20
SECRET = bytes(range(32))


class TestMemoryStore(KVStoreTests):
    @pytest.fixture
    def store(self) -> KVStore:
        return MemoryStore(MIB)


class TestMemoryStoreInt8(KVStoreTests):
    @pytest.fixture
    def store(self) -> KVStore:
        return MemoryStore(MIB, numbers="int8", eviction="cost")


class TestDiskStore(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with DiskStore(tmp_path / "kv", 8 * MIB) as store:
            yield store


class TestDiskStoreInt8(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with DiskStore(tmp_path / "kv", 8 * MIB, numbers="int8", eviction="lru") as store:
            yield store


class TestDiskStoreFp8(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with DiskStore(tmp_path / "kv", 8 * MIB, numbers="fp8", eviction="lfu") as store:
            yield store


class TestEncryptedDiskStore(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with DiskStore(tmp_path / "kv", 8 * MIB, cipher=StoreCipher(SECRET)) as store:
            yield store


class TestMemoryOverDisk(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with TieredStore(MemoryStore(MIB), DiskStore(tmp_path / "kv", 8 * MIB)) as store:
            yield store


class TestAMemoryTooSmallOverDisk(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with TieredStore(MemoryStore(10), DiskStore(tmp_path / "kv", 8 * MIB)) as store:
            yield store


class TestMemoryOverDiskWrittenLater(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        disk = DiskStore(tmp_path / "kv", 8 * MIB, numbers="int8")
        with TieredStore(MemoryStore(MIB, numbers="int8"), disk, write_behind_bytes=8192) as store:
            yield store


class TestThreeTiers(KVStoreTests):
    """The third stands for a store on another machine."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        remote = TieredStore(DiskStore(tmp_path / "kv", 8 * MIB), MemoryStore(8 * MIB), write_behind_bytes=MIB)
        with TieredStore(MemoryStore(MIB), remote) as store:
            yield store


class TestTenantOverDisk(KVStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with DiskStore(tmp_path / "kv", 8 * MIB) as disk:
            yield TenantStore(disk, "alice", SECRET)
