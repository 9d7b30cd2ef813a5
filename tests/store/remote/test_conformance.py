"""Stores on other machines pass the conformance tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from qcfuse_rag import KVStore
from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
from qcfuse_rag.store.backends.redis_blobs import RedisBlobs
from qcfuse_rag.store.backends.remote import RemoteStore
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import KVStoreTests
from tests.store.remote.entries import SECRET


class TestBuckets(KVStoreTests):
    @pytest.fixture(params=["memory", "gs", "cloud"])
    def store(self, request: pytest.FixtureRequest) -> Iterator[KVStore]:
        with RemoteStore(FsspecBlobs(f"{request.param}://{uuid.uuid4()}/kv")) as store:
            yield store


class TestSharedFolder(KVStoreTests):
    @pytest.fixture
    def store(self, in_folder: FsspecBlobs) -> Iterator[KVStore]:
        with RemoteStore(in_folder, kv_dtype="int8") as store:
            yield store


class TestEncryptedRedis(KVStoreTests):
    @pytest.fixture
    def store(self, on_redis: RedisBlobs) -> Iterator[KVStore]:
        with RemoteStore(on_redis, cipher=StoreCipher(SECRET), kv_dtype="int8") as store:
            yield store
