"""Remotes: buckets in memory and in a folder, and Redis."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
from qcfuse_rag.store.backends.redis_blobs import RedisBlobs
from qcfuse_rag.store.backends.remote import BlobStore
from tests.store.remote.filesystems import Away
from tests.store.remote.servers import RedisProcess, new_server


@pytest.fixture(scope="session")
def server() -> Iterator[RedisProcess]:
    """Give a server that all tests share, each with a prefix of its own."""
    server = new_server()
    yield server
    server.remove()


@pytest.fixture
def own_server() -> Iterator[RedisProcess]:
    """Give a server that a test may kill."""
    server = new_server()
    yield server
    server.remove()


@pytest.fixture
def on_redis(server: RedisProcess) -> RedisBlobs:
    return RedisBlobs(server.url, f"{uuid.uuid4()}[*]:")


@pytest.fixture
def in_memory() -> FsspecBlobs:
    return FsspecBlobs(f"memory://{uuid.uuid4()}/kv")


@pytest.fixture
def in_folder(tmp_path: Path) -> FsspecBlobs:
    return FsspecBlobs(f"file://{tmp_path}/kv")


@pytest.fixture(params=["in_memory", "in_folder", "on_redis"])
def blobs(request: pytest.FixtureRequest) -> BlobStore:
    found: BlobStore = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def away() -> Iterator[type[Away]]:
    yield Away
    Away.down = False
