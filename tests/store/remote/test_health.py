"""The health report of a remote."""

from __future__ import annotations

import pytest

from qcfuse_rag.store.backends.base import Health, Miss
from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
from qcfuse_rag.store.backends.remote import BlobStore, RemoteStore
from qcfuse_rag.store.testing import example_key
from tests.store.remote.filesystems import Away


def test_health_ends_a_rest_that_is_over(away: type[Away]) -> None:
    store = RemoteStore(FsspecBlobs("away://rest/kv"), pause_s=1000.0)
    away.down = True
    assert isinstance(store.get(example_key()), Miss)
    away.down = False
    assert store.get(example_key()) == Miss("remote away cannot be reached: no route to host")
    assert store.health()[0].ok
    assert store.get(example_key()) == Miss("absent")


def test_health_leaves_nothing_behind(blobs: BlobStore) -> None:
    assert RemoteStore(blobs).health() == [Health(f"remote {blobs.kind}", ok=True)]
    assert list(blobs.names()) == []


def test_health_tells_of_a_remote_that_forgets(in_memory: FsspecBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "write", lambda *arguments: None)
    [health] = RemoteStore(in_memory).health()
    assert health.problems == ("does not return what was written; is it full, or is there a proxy in between?",)
