"""URLs of remotes, and the libraries they need."""

from __future__ import annotations

import re
import sys

import pytest

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
from qcfuse_rag.store.backends.redis_blobs import RedisBlobs
from qcfuse_rag.store.backends.remote import RemoteStore, open_remote


def test_a_missing_client_library_is_an_error_that_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StoreError, match=re.escape("pip install 'qcfuse-rag[remote]'")):
        FsspecBlobs("memory://x")
    with pytest.raises(StoreError, match=re.escape("pip install 'qcfuse-rag[redis]'")):
        RedisBlobs("redis://localhost")


@pytest.mark.parametrize("url", ["nowhere://x", "redis+nothing://x"])
def test_a_url_that_nothing_understands_is_an_error(url: str) -> None:
    with pytest.raises(StoreError, match="cannot use URLs that begin with"):
        open_remote(url)


@pytest.mark.parametrize(
    "url", ["reference://x::file:///etc/passwd", "simplecache::s3://bucket", "REFERENCE://x", "zip://a.kv::/tmp/b.zip"]
)
def test_a_url_that_leads_through_another_is_refused_before_anything_is_read(url: str) -> None:
    with pytest.raises(StoreError, match="chained or a reference"):
        open_remote(url)


def test_a_redis_url_that_is_none_does_not_show_its_password() -> None:
    with pytest.raises(StoreError, match="a Redis URL begins with") as caught:
        open_remote("redis://:secret@host:port/0")
    assert "secret" not in str(caught.value)


def test_a_format_that_is_none_is_an_error(in_memory: FsspecBlobs) -> None:
    with pytest.raises(ValueError, match="no kv_dtype 'int3'"):
        RemoteStore(in_memory, kv_dtype="int3")
