"""Damaged, forged, encrypted or expired entries of a remote are misses."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import redis

from qcfuse_rag import MemoryStore, TieredStore
from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.redis_blobs import RedisBlobs
from qcfuse_rag.store.backends.remote import BlobStore, RemoteStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import encode
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.remote.entries import ENTRY, NAME, SECRET
from tests.store.remote.servers import RedisProcess

DAMAGE: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: b"", "truncated: 0 bytes"),  # how others are told is in `tests/store/disk/test_damage.py`
    (lambda data: b"".join(encode(example_key(7), example_chunk())), "entry of another chunk: ids differ"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_blob_is_a_miss_goes_into_quarantine_and_heals(
    blobs: BlobStore, damage: Callable[[bytes], bytes], reason: str
) -> None:
    store = RemoteStore(blobs)
    blobs.write(NAME, [damage(ENTRY)])
    found = store.get(example_key())
    assert isinstance(found, Miss)
    assert re.search(reason, found.reason), found.reason
    assert example_key() not in store
    assert store.get(example_key()) == Miss("absent")
    [(name, size)] = blobs.names("quarantine")
    assert name == f"quarantine/{example_key().address}.kv"
    assert (blobs.read(name), size) == (damage(ENTRY), len(damage(ENTRY)))
    store.put(example_key(), example_chunk())
    assert_same(store.get(example_key()), example_chunk())
    [stats] = store.stats()
    assert (stats.entries, stats.size_bytes) == (1, len(ENTRY) + size)
    assert (stats.hits, stats.misses, stats.discarded, stats.limit_bytes) == (1, 2, 1, None)
    assert store.clear() == 1
    assert list(blobs.names("quarantine")) == []


def test_a_damaged_block_is_found_when_it_is_read(blobs: BlobStore) -> None:
    blobs.write(NAME, [ENTRY[:-1] + bytes([ENTRY[-1] ^ 1])])
    found = RemoteStore(blobs).get(example_key())
    assert isinstance(found, ChunkKV)
    with pytest.raises(CorruptEntry, match=r"block value\.2 differs"):
        found.read()
    store = TieredStore(MemoryStore(), RemoteStore(blobs))
    assert store.get(example_key()) == Miss("checksum of block value.2 differs")
    assert example_key() not in store
    store.put(example_key(), example_chunk())
    assert_same(store.get(example_key()), example_chunk())


def test_what_is_in_quarantine_goes_before_the_entry(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds the entry gone does not try again."""
    store = RemoteStore(blobs)
    store.put(example_key(), example_chunk())
    store.discard(example_key(), "looks odd")
    store.put(example_key(), example_chunk())
    deleted, delete = list[str](), blobs.delete
    monkeypatch.setattr(blobs, "delete", lambda name: (deleted.append(name), delete(name))[1])
    assert store.discard(example_key())
    assert deleted == [f"quarantine/{NAME}", NAME]


def test_an_entry_is_opened_under_its_own_address_only(blobs: BlobStore) -> None:
    blobs.write("0123.kv", [ENTRY])
    assert RemoteStore(blobs).open("0123") == Miss("entry of another chunk: address differ")


def test_what_else_lies_there_is_no_entry(blobs: BlobStore) -> None:
    store = RemoteStore(blobs)
    store.put(example_key(), example_chunk())
    blobs.write("README.txt", [b"hands off"])
    blobs.write("elsewhere-1.probe", [b"1"])
    assert [entry.address for entry in store.entries()] == [example_key().address]
    assert store.clear() == 1
    assert blobs.read("README.txt") == b"hands off"


def test_a_sealed_entry_tells_nothing_and_opens_under_its_secret_only(blobs: BlobStore) -> None:
    RemoteStore(blobs, cipher=StoreCipher(SECRET)).put(example_key(), example_chunk())
    [(name, _)] = blobs.names()
    data = blobs.read(name)
    assert data is not None
    assert b"framed" not in data
    assert example_chunk().blocks["key.0"].numpy().tobytes() not in data
    assert RemoteStore(blobs).get(example_key()) == Miss("is encrypted and no secret was given")
    blobs.write(name, [data])
    other = RemoteStore(blobs, cipher=StoreCipher(bytes(32))).get(example_key())
    assert other == Miss("cannot be decrypted: changed, or written under another secret")
    blobs.write(name, [data])
    assert_same(RemoteStore(blobs, cipher=StoreCipher(SECRET)).get(example_key()), example_chunk())
    blobs.write(name, [ENTRY])
    assert isinstance(RemoteStore(blobs, cipher=StoreCipher(SECRET)).get(example_key()), Miss)


def test_entries_expire(blobs: BlobStore) -> None:
    store = RemoteStore(blobs, ttl_s=0.5)
    store.put(example_key(), example_chunk())
    assert_same(store.get(example_key()), example_chunk())
    assert example_key() in store
    time.sleep(0.55)
    assert example_key() not in store, "or a warming job would leave it out"
    assert store.get(example_key()) == Miss("absent")
    assert example_key() not in store
    assert list(blobs.names()) == []
    assert store.stats()[0].discarded == 0


def test_an_expiry_the_chunk_brings_counts_before_that_of_the_store(server: RedisProcess) -> None:
    blobs = RedisBlobs(server.url, "until:")
    RemoteStore(blobs, ttl_s=1000.0).put(example_key(), example_chunk().with_expiry(time.time() + 50.0))
    left_ms = redis.Redis(unix_socket_path=server.socket).pttl(f"until:{NAME}")
    assert 40_000 < left_ms <= 50_000
