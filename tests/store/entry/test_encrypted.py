"""Encrypted entries."""

from __future__ import annotations

import pytest

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.entry.entries import SECRET, opened, with_header, written


def test_a_sealed_entry_tells_nothing_of_what_it_holds() -> None:
    chunk = example_chunk(n_tokens=300)
    data = written(chunk, StoreCipher(SECRET))
    telling = [b"weights", b"framed", b"ranking", example_key().ids.encode()]
    telling += [chunk.blocks[name].numpy().tobytes()[:16] for name in chunk.names()]
    assert [text for text in telling if text in data] == []
    assert all(text in written(chunk) for text in telling), "which can be found where it is not encrypted"


def test_nothing_is_encrypted_twice_in_the_same_way() -> None:
    first, other = (written(example_chunk(), StoreCipher(SECRET)) for _ in range(2))
    assert first[32:64] != other[32:64]
    assert first[64:80] != other[64:80]
    assert first[-16:] != other[-16:]


def test_a_changed_header_is_refused_even_if_its_checksum_was_made_right() -> None:
    data = written(example_chunk(), StoreCipher(SECRET))
    header = bytearray(data[64 : 64 + int.from_bytes(data[16:20], "little")])
    assert_same(opened(with_header(data, bytes(header), flags=1), StoreCipher(SECRET))[1], example_chunk())
    header[100] ^= 1
    with pytest.raises(CorruptEntry, match="cannot be decrypted"):
        opened(with_header(data, bytes(header), flags=1), StoreCipher(SECRET))


def test_the_cipher_itself_refuses_a_part_in_the_place_of_another() -> None:
    _, entry_cipher = StoreCipher(SECRET).new_entry()
    stored = entry_cipher.encrypt(1, b"first")
    assert entry_cipher.decrypt(1, stored) == b"first"
    with pytest.raises(CorruptEntry, match="cannot be decrypted"):
        entry_cipher.decrypt(2, stored)
    with pytest.raises(CorruptEntry, match="cannot be decrypted"):
        StoreCipher(SECRET).entry(bytes(32)).decrypt(1, stored)


def test_a_short_secret_is_refused_and_a_long_one_not_shown() -> None:
    with pytest.raises(StoreError, match="the secret has 15 bytes; give at least 16 random ones"):
        StoreCipher(b"fifteen letters")
    assert "sixteen" not in repr(StoreCipher(b"sixteen letters."))
