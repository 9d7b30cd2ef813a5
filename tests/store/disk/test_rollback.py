"""Replace entries of an encrypted store: an older copy is believed, an entry of another key is not; see SECURITY.md."""

from __future__ import annotations

import shutil
from pathlib import Path

from qcfuse_rag import DiskStore
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key

CIPHER = StoreCipher(bytes(range(32)))
KEY, OTHER_KEY = example_key(0), example_key(1)


def entry_file(folder: Path, address: str) -> Path:
    [path] = (folder / "objects").rglob(f"*{address}*")
    return path


def test_an_older_copy_of_an_entry_is_taken_for_the_entry(tmp_path: Path) -> None:
    """This is not detected."""
    with DiskStore(tmp_path / "kv", cipher=CIPHER) as store:
        store.put(KEY, example_chunk(1))
        path = entry_file(tmp_path / "kv", KEY.address)
        shutil.copy(path, tmp_path / "older")
        store.put(KEY, example_chunk(2))
        shutil.copy(tmp_path / "older", path)
    with DiskStore(tmp_path / "kv", cipher=CIPHER) as store:
        assert_same(store.get(KEY), example_chunk(1))


def test_an_entry_of_another_passage_or_secret_is_not(tmp_path: Path) -> None:
    other_cipher = StoreCipher(bytes(range(1, 33)))
    for folder, cipher, key in (("kv", CIPHER, KEY), ("kv", CIPHER, OTHER_KEY), ("forged", other_cipher, KEY)):
        with DiskStore(tmp_path / folder, cipher=cipher) as store:
            store.put(key, example_chunk(1))
    path = entry_file(tmp_path / "kv", KEY.address)
    for source in (entry_file(tmp_path / "kv", OTHER_KEY.address), entry_file(tmp_path / "forged", KEY.address)):
        shutil.copy(source, path)
        with DiskStore(tmp_path / "kv", cipher=CIPHER) as store:
            assert isinstance(store.get(KEY), Miss)
