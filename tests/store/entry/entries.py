"""Encode and decode chunks in tests."""

from __future__ import annotations

import json
import struct
from typing import Any

import xxhash

from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.codec import BlockRange, BytesInMemory, StoredBlocks, encode, open_chunk
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import example_key

SECRET = bytes(range(32))

CIPHERS = {"plain": None, "encrypted": StoreCipher(SECRET)}


def written(chunk: ChunkKV, cipher: StoreCipher | None = None) -> bytes:
    return b"".join(encode(example_key(), chunk, cipher=cipher))


def opened(data: bytes, cipher: StoreCipher | None = None) -> ChunkKV:
    return open_chunk(BytesInMemory(data), cipher)[1]


def place_of(chunk: ChunkKV, name: str) -> tuple[BlockRange, int]:
    """Return where a block is among the others, and where the first of them begins in its entry."""
    assert isinstance(chunk.blocks, StoredBlocks)
    return chunk.blocks.ranges[name], chunk.blocks.start


class CountingSource(BytesInMemory):
    """Remembers which ranges were read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.ranges: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> memoryview:
        self.ranges.append((start, stop))
        return super().read(start, stop)


def with_header(data: bytes, header: bytes, *, flags: int = 0) -> bytes:
    """Put another header into an entry, its checksum made right, as somebody would who means harm."""
    length = int.from_bytes(data[16:20], "little")
    body = data[-(-(64 + length) // 4096) * 4096 :]
    front = b"QCFUSEKV" + struct.pack("<II", 2, flags)
    salt = data[32:64]
    checksum = xxhash.xxh3_64_intdigest(front + salt + struct.pack("<I", len(header)) + header)
    preamble = front + struct.pack("<I4xQ", len(header), checksum) + salt
    return preamble + header + bytes(-(64 + len(header)) % 4096) + body


def header_of(data: bytes) -> dict[str, Any]:
    return json.loads(data[64 : 64 + int.from_bytes(data[16:20], "little")])
