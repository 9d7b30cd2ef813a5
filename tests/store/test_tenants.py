"""Tenants of one store: nobody reads, detects or removes another's entries; see also `tests/conformance`."""

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
from tests.store.disk.folders import KEY, SECRET, put
from tests.store.test_tiered_store import PATIENCE_S, Watched
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES


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


def test_a_tenant_sees_counts_and_removes_its_own_entries_only(
    shared: DiskStore, alice: TenantStore, bob: TenantStore
) -> None:
    put(alice, 0, 1, 2)
    assert bob.get(KEY) == Miss("absent")
    assert KEY not in bob
    bob.put(KEY, example_chunk(9))
    shared.put(KEY, example_chunk(8))  # nobody's
    assert_same(alice.get(KEY), example_chunk())
    assert_same(bob.get(KEY), example_chunk(9))
    assert {entry.address for entry in alice.entries()} == {alice.address(example_key(n)) for n in range(3)}
    assert [store.stats()[-1].entries for store in (alice, bob, shared)] == [3, 1, 5]
    assert bob.stats()[-1].size_bytes == next(bob.entries()).size_bytes
    assert lookup(alice, [bob.address(KEY)]) == {bob.address(KEY): None}
    assert lookup(bob, [KEY]) == {bob.address(KEY): "disk"}
    assert alice.discard(KEY)
    assert alice.clear() == 2
    assert list(alice.entries()) == []
    assert_same(bob.get(KEY), example_chunk(9))
    assert_same(shared.get(KEY), example_chunk(8))


def test_anothers_address_and_a_key_that_names_another_mean_nothing(
    shared: DiskStore, alice: TenantStore, bob: TenantStore
) -> None:
    alice.put(KEY, example_chunk())
    shared.put(KEY, example_chunk())
    for address in (alice.address(KEY), KEY.address):
        assert bob.open(address) == Miss("absent")
        assert address not in bob
        assert not bob.pin(address)
        assert not bob.discard(address)
        assert not bob.discard(address, "looks odd")
    found = alice.open(alice.address(KEY))
    assert not isinstance(found, Miss)
    stolen = found[0]
    assert stolen.namespace != ""
    assert bob.get(stolen) == Miss("absent")
    assert not bob.discard(stolen)
    bob.put(stolen, example_chunk(9))
    assert_same(alice.get(KEY), example_chunk())
    assert KEY in shared


def test_addresses_cannot_be_made_without_the_secret(shared: DiskStore, alice: TenantStore, bob: TenantStore) -> None:
    guesses = [TenantStore(shared, "alice", b"another secret of enough bytes"), bob]
    guessed = {store.address(KEY) for store in guesses} | {KEY.address, replace(KEY, namespace="alice").address}
    assert len(guessed) == 4
    assert alice.address(KEY) not in guessed
    assert not any(alice.address(KEY)[17:] == address[-32:] for address in guessed)


def test_tenants_are_kept_apart_in_every_tier() -> None:
    near = Watched()
    with TieredStore(near, MemoryStore()) as shared:
        alice, bob = (TenantStore(shared, name, SECRET) for name in ("alice", "bob"))
        for number, store in enumerate((alice, bob, shared)):
            store.put(KEY, example_chunk(number))
        assert bob.clear() == 1
        assert [alice.address(KEY) in tier for tier in shared.tiers] == [True, True]
        near.clear()
        near.was_put.clear()
        alice.prefetch([KEY])
        assert near.was_put.wait(PATIENCE_S)
        assert [entry.address for entry in near.entries()] == [alice.address(KEY)]
        assert_same(alice.get(KEY), example_chunk())


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


def test_a_tenant_does_not_count_what_others_have_or_restrict(
    alice: TenantStore, bob: TenantStore, llama: LanguageModel
) -> None:
    first, other = make_engine(llama, alice), make_engine(llama, bob)
    first.warm(PASSAGES[:1], sources=["a"])
    other.warm(PASSAGES[1:], sources=["b"] * len(PASSAGES[1:]), access={"b": "board"})
    assert (first.corpus.index.count(), other.corpus.index.count()) == (1, len(PASSAGES[1:]))
    assert (first.corpus.open_sources().has_restricted(), other.corpus.open_sources().has_restricted()) == (False, True)


def test_a_tenant_needs_a_secret_and_not_the_name_that_proves_one(shared: DiskStore, tmp_path: Path) -> None:
    """Its token would be what lies in the clear beside an encrypted store."""
    with pytest.raises(StoreError, match=r"a tenant needs a secret; .* QCFUSE_TENANT_SECRET"):
        open_store(tmp_path / "new", tenant="alice")
    with pytest.raises(StoreError, match="no tenant can be called 'qcfuse-rag proof'"):
        TenantStore(shared, "qcfuse-rag proof", SECRET)
