"""Encrypted stores on disk, and entries under another secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from qcfuse_rag import DiskStore
from qcfuse_rag.errors import StoreError
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import assert_same, example_chunk
from tests.store.disk.folders import KEY, SECRET, put


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
