"""Tenants of one store: nobody reads, detects or removes another's entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from qcfuse_rag import DiskStore, LanguageModel, MemoryStore, open_store
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.admin import lookup
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.backends.tenant import TenantStore
from qcfuse_rag.store.backends.tiered import TieredStore
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.quantization import LOSSLESS
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.test_tiered_store import PATIENCE_S, Watched
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES

SECRET = bytes(range(32))
KEY = example_key()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "kv") as store:
        yield store


@pytest.fixture
def alice(shared: DiskStore) -> TenantStore:
    return TenantStore(shared, "alice", SECRET)


@pytest.fixture
def bob(shared: DiskStore) -> TenantStore:
    return TenantStore(shared, "bob", SECRET)


def test_equal_passages_of_two_tenants_are_two_entries(shared: DiskStore, alice: TenantStore, bob: TenantStore) -> None:
    alice.put(KEY, example_chunk(1))
    assert bob.get(KEY) == Miss("absent")
    assert KEY not in bob
    bob.put(KEY, example_chunk(2))
    assert_same(alice.get(KEY), example_chunk(1))
    assert_same(bob.get(KEY), example_chunk(2))
    assert shared.stats()[0].entries == 2


def test_a_tenant_has_nothing_to_do_with_what_is_nobodys(shared: DiskStore, alice: TenantStore) -> None:
    shared.put(KEY, example_chunk())
    assert alice.get(KEY) == Miss("absent")
    assert alice.open(KEY.address) == Miss("absent")
    assert not alice.discard(KEY.address)
    assert alice.clear() == 0
    assert KEY in shared


def test_addresses_cannot_be_made_without_the_secret(shared: DiskStore, alice: TenantStore, bob: TenantStore) -> None:
    guesses = [TenantStore(shared, "alice", b"another secret of enough bytes"), bob]
    guessed = {store.address(KEY) for store in guesses} | {KEY.address, replace(KEY, namespace="alice").address}
    assert len(guessed) == 4
    assert alice.address(KEY) not in guessed
    assert not any(alice.address(KEY)[17:] == address[-32:] for address in guessed)


def test_who_claims_to_be_another_is_still_oneself(alice: TenantStore, bob: TenantStore) -> None:
    """A namespace in a key that came with a request means nothing."""
    alice.put(KEY, example_chunk())
    found = alice.open(alice.address(KEY))
    assert not isinstance(found, Miss)
    stolen = found[0]
    assert stolen.namespace != ""
    assert bob.get(stolen) == Miss("absent")
    assert not bob.discard(stolen)
    bob.put(stolen, example_chunk(9))
    assert_same(alice.get(KEY), example_chunk())


def test_another_ones_address_opens_nothing(alice: TenantStore, bob: TenantStore) -> None:
    alice.put(KEY, example_chunk())
    address = alice.address(KEY)
    assert bob.open(address) == Miss("absent")
    assert address not in bob
    assert not bob.pin(address)
    assert not bob.discard(address)
    assert not bob.discard(address, "looks odd")
    assert_same(alice.get(KEY), example_chunk())


def test_a_tenant_sees_its_own_entries_only(shared: DiskStore, alice: TenantStore, bob: TenantStore) -> None:
    for number in range(3):
        alice.put(example_key(number), example_chunk(number))
    bob.put(KEY, example_chunk())
    assert {entry.address for entry in alice.entries()} == {alice.address(example_key(n)) for n in range(3)}
    assert [entry.address for entry in bob.entries()] == [bob.address(KEY)]
    assert [store.stats()[-1].entries for store in (alice, bob, shared)] == [3, 1, 4]
    assert bob.stats()[-1].size_bytes == next(bob.entries()).size_bytes


def test_a_tenant_removes_its_own_entries_only(alice: TenantStore, bob: TenantStore) -> None:
    for number in range(3):
        alice.put(example_key(number), example_chunk(number))
    bob.put(KEY, example_chunk())
    assert alice.discard(KEY)
    assert alice.clear() == 2
    assert list(alice.entries()) == []
    assert_same(bob.get(KEY), example_chunk())


def test_tenants_are_kept_apart_in_every_tier() -> None:
    with TieredStore(MemoryStore(), MemoryStore(), write_behind_bytes=1 << 20) as shared:
        alice, bob = (TenantStore(shared, name, SECRET) for name in ("alice", "bob"))
        alice.put(KEY, example_chunk(1))
        assert bob.get(KEY) == Miss("absent")
        bob.put(KEY, example_chunk(2))
        bob.flush()
        assert bob.clear() == 1
        assert [alice.address(KEY) in tier for tier in shared.tiers] == [True, True]
        assert_same(alice.get(KEY), example_chunk(1))


def test_prefetch_brings_a_tenants_own_entry_near() -> None:
    near = Watched()
    with TieredStore(near, MemoryStore()) as shared:
        alice = TenantStore(shared, "alice", SECRET)
        for store in (shared.far, TenantStore(shared.far, "alice", SECRET)):
            store.put(KEY, example_chunk())
        alice.prefetch([KEY])
        assert near.was_put.wait(PATIENCE_S)
        assert [entry.address for entry in near.entries()] == [alice.address(KEY)]


def test_a_tenant_needs_a_secret(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"a tenant needs a secret; .* QCFUSE_TENANT_SECRET"):
        open_store(tmp_path, tenant="alice")


def test_a_tenant_of_an_encrypted_store(tmp_path: Path) -> None:
    options = {"secret": SECRET, "encrypt": True, "kv_dtype": LOSSLESS}
    with open_store(tmp_path, tenant="alice", **options) as alice:  # type: ignore[arg-type]
        alice.put(KEY, example_chunk())
    with open_store(tmp_path, tenant="alice", **options) as alice:  # type: ignore[arg-type]
        assert_same(alice.get(KEY), example_chunk())
    with open_store(tmp_path, tenant="bob", **options) as bob:  # type: ignore[arg-type]
        assert bob.get(KEY) == Miss("absent")
    with DiskStore(tmp_path, cipher=StoreCipher(SECRET)) as disk:
        [entry] = disk.entries()
        found = disk.open(entry.address)
        assert not isinstance(found, Miss)
        namespace = found[0].namespace.encode()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert [data for data in files if b"alice" in data or SECRET in data or namespace in data] == []


def test_closing_a_view_leaves_a_shared_store_open(shared: DiskStore, alice: TenantStore) -> None:
    with alice:
        alice.put(KEY, example_chunk())
    assert shared.stats()[0].entries == 1


def test_a_tenant_is_not_told_where_anothers_entry_is(alice: TenantStore, bob: TenantStore) -> None:
    bob.put(KEY, example_chunk())
    assert lookup(alice, [bob.address(KEY)]) == {bob.address(KEY): None}
    assert lookup(bob, [KEY]) == {bob.address(KEY): "disk"}


def test_a_tenant_does_not_count_what_others_have_or_restrict(
    shared: DiskStore, alice: TenantStore, bob: TenantStore, llama: LanguageModel
) -> None:
    first, other = make_engine(llama, alice), make_engine(llama, bob)
    first.warm(PASSAGES[:1], sources=["a"])
    other.warm(PASSAGES[1:], sources=["b"] * len(PASSAGES[1:]), access={"b": "board"})
    assert (first.corpus.signatures.count(), other.corpus.signatures.count()) == (1, len(PASSAGES[1:]))
    assert (first.corpus.open_sources().has_restricted(), other.corpus.open_sources().has_restricted()) == (False, True)


def test_no_tenant_has_the_name_that_proves_a_secret(shared: DiskStore) -> None:
    """Its token would be what lies in the clear beside an encrypted store."""
    with pytest.raises(StoreError, match="no tenant can be called 'qcfuse-rag proof'"):
        TenantStore(shared, "qcfuse-rag proof", SECRET)
