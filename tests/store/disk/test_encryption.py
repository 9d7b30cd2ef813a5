"""Encrypted stores on disk, and entries under another secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.disk.folders import KEY, SECRET, file_of, put


@pytest.mark.parametrize(
    ("first", "then"), [(StoreCipher(SECRET), None), (None, StoreCipher(SECRET))], ids=["lost", "surplus"]
)
def test_a_store_is_encrypted_or_it_is_not(folder: Path, first: StoreCipher | None, then: StoreCipher | None) -> None:
    with DiskStore(folder, cipher=first) as store:
        put(store, 0)
    with pytest.raises(StoreError, match=rf"the store in {folder} .* encrypted and .* secret was given"):
        DiskStore(folder, cipher=then)
    with DiskStore(folder, cipher=first) as store:
        assert_same(store.get(KEY), example_chunk())


def test_nothing_of_a_text_is_in_the_files_of_an_encrypted_store(folder: Path) -> None:
    with DiskStore(folder, cipher=StoreCipher(SECRET)) as store:
        put(store, 0)
    telling = example_chunk().blocks["key.0"].numpy().tobytes()[:32]
    assert [
        p for p in folder.rglob("*") if p.is_file() and (telling in p.read_bytes() or SECRET in p.read_bytes())
    ] == []


def test_two_encrypted_files_that_changed_places_are_refused(folder: Path) -> None:
    with DiskStore(folder, cipher=StoreCipher(SECRET)) as store:
        put(store, 0, 1)
        first, other = file_of(store, 0).read_bytes(), file_of(store, 1).read_bytes()
        file_of(store, 0).write_bytes(other)
        file_of(store, 1).write_bytes(first)
        assert [store.get(example_key(n)) for n in (0, 1)] == [Miss("entry of another chunk: ids differ")] * 2


def test_another_secret_is_refused_before_anything_is_read(folder: Path) -> None:
    with DiskStore(folder, cipher=StoreCipher(SECRET)) as store:
        store.put(KEY, example_chunk())
    with pytest.raises(StoreError, match="encrypted under another secret"):
        DiskStore(folder, cipher=StoreCipher(SECRET[::-1]))
    assert SECRET.hex() not in (folder / "store.json").read_text()
    with DiskStore(folder, cipher=StoreCipher(SECRET)) as store:
        assert_same(store.get(KEY), example_chunk())


def test_plain_entries_are_not_joined_by_encrypted_ones(folder: Path) -> None:
    with DiskStore(folder) as store:
        store.put(KEY, example_chunk())
    (folder / "store.json").unlink()
    with pytest.raises(StoreError, match="are not encrypted and a secret was given"):
        DiskStore(folder, cipher=StoreCipher(SECRET))


def test_another_secret_is_refused_even_when_the_settings_are_lost(folder: Path) -> None:
    with DiskStore(folder, cipher=StoreCipher(SECRET)) as store:
        put(store, 0, 1)
    (folder / "store.json").unlink()
    with pytest.raises(StoreError, match="are encrypted under another secret"):
        DiskStore(folder, cipher=StoreCipher(SECRET[::-1]))
    with DiskStore(folder, cipher=StoreCipher(SECRET)) as store:
        assert_same(store.get(KEY), example_chunk())
