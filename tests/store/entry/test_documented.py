"""The bytes of an entry are as docs/reference/store-format.md describes them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash

from qcfuse_rag.store.chunk import ChunkKV, to_format
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.quantization import STORE_FORMATS
from qcfuse_rag.store.testing import DTYPES, example_chunk, example_key
from tests.store.entry.entries import SECRET, header_of, written


def fixed_chunk() -> ChunkKV:
    """Return a chunk that no random number generator had a part in."""
    keys = [torch.arange(2 * 130 * 4, dtype=torch.float32).reshape(2, 130, 4) + layer for layer in range(2)]
    values = [-key[..., :3] for key in keys]
    ranking = torch.arange(130).flip(0).expand(2, 130)
    return ChunkKV.of([key.to(torch.bfloat16) for key in keys], [v.to(torch.bfloat16) for v in values], ranking)


NUMPY = {"int32": "<i4", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int8": "i1"}


def read_by_hand(data: bytes, secret: bytes | None = None) -> dict[str, np.ndarray]:
    """Read an entry as a stranger would who has docs/reference/store-format.md and nothing of this library."""
    magic, version, flags, length, checksum, salt = struct.unpack("<8sIII4xQ32s", data[:64])
    assert (magic, version, flags) == (b"QCFUSEKV", 2, int(secret is not None))
    header, context = data[64 : 64 + length], struct.pack("<8sII", magic, version, flags) + salt
    assert xxhash.xxh3_64_intdigest(context + struct.pack("<I", length) + header) == checksum
    decrypt = decryption(secret, salt) if secret is not None else lambda number, stored, context: stored
    start = (64 + length + 4095) // 4096 * 4096
    number, blocks = 0, {}
    for block in json.loads(decrypt(number, header, context))["blocks"]:
        at, left, raw = start + block["offset"], block["shape"][0], b""
        row = np.dtype(NUMPY[block["dtype"]]).itemsize * int(np.prod(block["shape"][1:]))
        for expected in block["xxh3"]:
            number += 1
            size = min(128, left) * row + (16 if secret is not None else 0)
            assert xxhash.xxh3_64_hexdigest(data[at : at + size]) == expected
            raw += decrypt(number, data[at : at + size], b"")
            at, left = at + size, left - 128
        blocks[block["name"]] = np.frombuffer(raw, NUMPY[block["dtype"]]).reshape(block["shape"])
    return blocks


def decryption(secret: bytes, salt: bytes) -> Callable[[int, bytes, bytes], bytes]:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"qcfuse-rag entry").derive(secret)
    return lambda number, stored, context: AESGCM(key).decrypt(number.to_bytes(12, "big"), stored, context)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "secret"),
    [
        *((dtype, "model", SECRET) for dtype in DTYPES),
        *((torch.bfloat16, kv_dtype, None) for kv_dtype in (*STORE_FORMATS, "rank16")),
    ],
    ids=str,
)
def test_a_stranger_can_read_an_entry(dtype: torch.dtype, kv_dtype: str, secret: bytes | None) -> None:
    chunk = to_format(example_chunk(n_tokens=300, dtype=dtype), kv_dtype)
    blocks = read_by_hand(written(chunk, None if secret is None else StoreCipher(secret)), secret)
    assert list(blocks) == chunk.names()
    for name in chunk.names():
        assert blocks[name].shape == tuple(chunk.blocks[name].shape)
        assert blocks[name].tobytes() == chunk.blocks[name].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("kv_dtype", "expected"),
    [
        ("model", "f9c0fa6ab0ee6bbe900074eca0ef3101"),
        ("int8", "27f647cae97dd776084f47ff8f590c94"),
    ],
)
def test_an_entry_is_the_same_bytes_as_ever(kv_dtype: str, expected: str) -> None:
    """If this fails, stores written before cannot be read: raise the version of the format."""
    data = written(to_format(fixed_chunk(), kv_dtype))
    assert hashlib.blake2b(data, digest_size=16).hexdigest() == expected


def test_the_bytes_of_an_entry_with_provenance_do_not_change() -> None:
    """Its fields stand between the expiry and the blocks."""
    plain = fixed_chunk()
    keys, values = ([plain.layer(layer)[kind] for layer in range(2)] for kind in range(2))
    chunk = ChunkKV.of(
        keys,
        values,
        plain.blocks["ranking"],
        notes={
            "context": [example_key(7).ids, example_key(8).ids],
            "facts": {"cci": [0.625], "inter": [1.5, 0.25]},
        },
        extras={"inter": torch.arange(130) / 128},
    )
    data = written(chunk)
    about = header_of(data)
    assert list(about)[6:] == ["expires", "context", "facts", "extras", "blocks"]
    assert [block["name"] for block in about["blocks"]][:3] == ["ranking", "inter", "key.0"]
    assert hashlib.blake2b(data, digest_size=16).hexdigest() == "99f444ce2c90bc1f76b84c61e403c513"


def test_an_address_is_the_same_as_ever() -> None:
    """If this fails, nothing that was stored before is found any more."""
    assert example_key().address == "f0fe82557d26fc0ebe0b686094e1a84e"
    assert replace(example_key(), namespace="token").address == "b7ec0488fd6ac0b8-6afd6f36c1ac5ffc4da9c800790e8790"
