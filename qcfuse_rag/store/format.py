"""Bytes of a stored chunk: a checked header, then checked blocks, readable one by one.

    offset 0    magic `QCFUSEKV`, version u32, header length u32, header checksum u64 (little endian)
    then        header, JSON: the key's fields, tokens, layers, and for each block name, dtype, shape, offset, checksum
    then        blocks, each starting at a multiple of 4096: ranking, key.0, value.0, key.1, ...

Layer after layer is the order in which a fused prefill reads. Checksums are XXH3: they catch what disks and crashes
do, not what an adversary with write access does.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey

MAGIC = b"QCFUSEKV"
VERSION = 1
ALIGNMENT = 4096
MAX_HEADER_BYTES = 4 << 20
PREAMBLE = struct.Struct("<8sIIQ")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32}


def encode(key: ChunkKey, chunk: ChunkKV) -> bytes:
    """Serialise a chunk.

    Returns:
        The whole entry; blocks are copied to the CPU if they are elsewhere.
    """
    blocks: list[dict[str, Any]] = []
    parts: list[tuple[int, bytes]] = []
    offset = 0
    for name in chunk.names():
        tensor = chunk.blocks[name].detach().cpu().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        blocks.append(
            {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset, "xxh3": _checksum(raw)}
        )
        parts.append((offset, raw))
        offset += _aligned(len(raw))
    header = json.dumps(
        {"key": key.fields(), "tokens": chunk.n_tokens, "layers": chunk.n_layers, "blocks": blocks}
    ).encode()
    start = _aligned(PREAMBLE.size + len(header))
    out = bytearray(start + offset)
    PREAMBLE.pack_into(out, 0, MAGIC, VERSION, len(header), xxhash.xxh3_64_intdigest(header))
    out[PREAMBLE.size : PREAMBLE.size + len(header)] = header
    for at, raw in parts:
        out[start + at : start + at + len(raw)] = raw
    return bytes(out)


def decode(data: memoryview, key: ChunkKey) -> ChunkKV:
    """Open an entry without reading its blocks; each is checked when it is first used.

    Args:
        data: the entry, in writable memory for torch's sake; the chunk's tensors are views of it.
        key: what the entry must be.

    Raises:
        CorruptEntry: if the header is damaged, of another version, or of another key; the message says which. A
            damaged block raises the same when it is read.
    """
    if len(data) < PREAMBLE.size:
        raise CorruptEntry(f"truncated: {len(data)} bytes")
    magic, version, header_bytes, checksum = PREAMBLE.unpack_from(data)
    if magic != MAGIC:
        raise CorruptEntry("not a stored chunk")
    if version != VERSION:
        raise CorruptEntry(f"format version {version}, this library reads {VERSION}")
    if header_bytes > MAX_HEADER_BYTES or PREAMBLE.size + header_bytes > len(data):
        raise CorruptEntry("truncated header")
    raw = bytes(data[PREAMBLE.size : PREAMBLE.size + header_bytes])
    if xxhash.xxh3_64_intdigest(raw) != checksum:
        raise CorruptEntry("header checksum differs")
    header = json.loads(raw)
    if header["key"] != key.fields():
        raise CorruptEntry(f"entry of another chunk: {', '.join(_key_differences(header['key'], key))} differ")
    blocks = VerifiedBlocks(data[_aligned(PREAMBLE.size + header_bytes) :], header["blocks"])
    return ChunkKV(n_tokens=header["tokens"], n_layers=header["layers"], blocks=blocks)


class VerifiedBlocks(Mapping[str, Tensor]):
    """Blocks of an entry as tensors, each checked once, when it is first read.

    Args:
        data: the entry from its first block on.
        blocks: the header's list of blocks.
    """

    def __init__(self, data: memoryview, blocks: list[dict[str, Any]]) -> None:
        self._data = data
        self._blocks = {block["name"]: block for block in blocks}
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._checked(self._blocks[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def _checked(self, block: dict[str, Any]) -> Tensor:
        dtype, count = DTYPES[block["dtype"]], math.prod(block["shape"])
        size = count * dtype.itemsize
        raw = self._data[block["offset"] : block["offset"] + size]
        if len(raw) != size:
            raise CorruptEntry(f"truncated in block {block['name']}")
        if _checksum(raw) != block["xxh3"]:
            raise CorruptEntry(f"checksum of block {block['name']} differs")
        return torch.frombuffer(raw, dtype=dtype, count=count).reshape(block["shape"])


def _checksum(raw: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(raw)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _key_differences(found: dict[str, Any], key: ChunkKey) -> list[str]:
    parts = [name for name in ("base", "prefix", "ids") if found.get(name) != key.fields()[name]]
    return key.fingerprint.differences(found.get("fingerprint", {})) + parts
