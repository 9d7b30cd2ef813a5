"""Encrypted entries."""

from __future__ import annotations

import pytest

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import assert_same, example_chunk, example_key
from tests.store.entry.entries import SECRET, opened, with_header, written

CIPHER = StoreCipher(SECRET)


def test_a_sealed_entry_tells_nothing_of_what_it_holds() -> None:
    chunk = example_chunk(n_tokens=300)
    data = written(chunk, CIPHER)
    telling = [b"weights", b"framed", b"ranking", example_key().ids.encode()]
    telling += [chunk.blocks[name].numpy().tobytes()[:16] for name in chunk.names()]
    assert [text for text in telling if text in data] == []
    assert all(text in written(chunk) for text in telling), "which can be found where it is not encrypted"


def test_nothing_is_encrypted_twice_in_the_same_way_and_no_secret_shown() -> None:
    first, other = (written(example_chunk(), CIPHER) for _ in range(2))
    for part in (slice(32, 64), slice(64, 80), slice(-16, None)):
        assert first[part] != other[part]
    assert "sixteen" not in repr(StoreCipher(b"sixteen letters."))


def test_a_changed_header_is_refused_even_if_its_checksum_was_made_right() -> None:
    data = written(example_chunk(), CIPHER)
    header = bytearray(data[64 : 64 + int.from_bytes(data[16:20], "little")])
    assert_same(opened(with_header(data, bytes(header), flags=1), CIPHER), example_chunk())
    header[100] ^= 1
    with pytest.raises(CorruptEntry, match="cannot be decrypted"):
        opened(with_header(data, bytes(header), flags=1), CIPHER)


def test_the_cipher_itself_refuses_a_part_in_the_place_of_another() -> None:
    _, entry_cipher = CIPHER.new_entry()
    stored = entry_cipher.encrypt(1, b"first")
    assert entry_cipher.decrypt(1, stored) == b"first"
    for cipher, number in ((entry_cipher, 2), (CIPHER.entry(bytes(32)), 1)):
        with pytest.raises(CorruptEntry, match="cannot be decrypted"):
            cipher.decrypt(number, stored)
