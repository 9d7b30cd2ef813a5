"""Writes to a remote are atomic; which URLs there are, and the libraries they need."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.fsspec_blobs import FsspecBlobs
from qcfuse_rag.store.backends.redis_blobs import RedisBlobs
from qcfuse_rag.store.backends.remote import RemoteStore, open_remote
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.remote.entries import ENTRY, NAME
from tests.store.remote.filesystems import Torn


def test_another_client_sees_what_one_wrote_and_removed(in_folder: FsspecBlobs, tmp_path: Path) -> None:
    ours, theirs = RemoteStore(in_folder), open_remote(f"{tmp_path}/kv")
    assert example_key() not in theirs
    ours.put(example_key(), example_chunk())
    assert_same(theirs.get(example_key()), example_chunk())
    theirs.discard(example_key())
    assert example_key() not in ours


@pytest.mark.parametrize("before", [None, ENTRY])
def test_a_write_that_fails_shows_nothing_under_the_final_name(tmp_path: Path, before: bytes | None) -> None:
    if before is not None:
        FsspecBlobs(f"file://{tmp_path}").write(NAME, [before])
    Torn.seen.clear()
    store = RemoteStore(FsspecBlobs(f"torn://{tmp_path}"))
    with pytest.raises(StoreError, match=r"remote torn failed: .*No space left on device"):
        store.put(example_key(), example_chunk(5))
    names = [NAME] if before is not None else []
    assert Torn.seen == names
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == names
    if before is not None:
        assert_same(store.get(example_key()), example_chunk())
    else:
        assert store.get(example_key()) == Miss("absent")


def test_a_share_where_a_file_takes_no_others_name_still_replaces(tmp_path: Path) -> None:
    store = RemoteStore(FsspecBlobs(f"stubborn://{tmp_path}"))
    store.put(example_key(), example_chunk(1))
    store.put(example_key(), example_chunk(2))
    assert_same(store.get(example_key()), example_chunk(2))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [NAME]


def test_what_a_dead_writer_left_is_no_entry(in_folder: FsspecBlobs, tmp_path: Path) -> None:
    store = RemoteStore(in_folder)
    store.put(example_key(), example_chunk())
    (tmp_path / "kv" / "tmp" / f"{'0' * 32}.part").write_bytes(ENTRY[:100])
    (tmp_path / "kv" / "tmp" / "0.kv").write_bytes(ENTRY[:100])
    assert [entry.address for entry in store.entries()] == [example_key().address]
    assert store.stats()[0].size_bytes == len(ENTRY)


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
