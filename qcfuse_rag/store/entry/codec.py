"""Encode and decode a stored chunk; docs/reference/store-format.md describes the layout for other readers.

    offset 0    preamble, 64 bytes: magic, version, flags, header length, checksum, salt
    then        header, JSON, at most 4 MiB: the key, the format, and where the blocks are
    then        blocks, each at a multiple of 4096, in the order a fused prefill reads them

A block is divided along its first dimension into pieces with a checksum each, so that a range of tokens can be read and
checked alone. Every part is checked before it is used, and sizes before memory is allocated for them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from qcfuse_rag.errors import CorruptEntry, ForeignEntry, StoreError
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry.encryption import SALT_BYTES, EntryCipher, StoreCipher
from qcfuse_rag.store.entry.header import ROWS_PER_PIECE, Header, aligned, parse_header
from qcfuse_rag.store.key import ChunkKey

MAGIC = b"QCFUSEKV"
VERSION = 2
ENCRYPTED = 1
MAX_HEADER_BYTES = 4 << 20
PREAMBLE = struct.Struct(f"<8sIII4xQ{SALT_BYTES}s")
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Preamble:
    """The first 64 bytes of an entry.

    Attributes:
        flags: 1 if the entry is encrypted, else 0.
        header_bytes: length of the header that follows.
        checksum: XXH3-64 over magic, version, flags, salt, header length and header as stored.
        salt: 32 random bytes of an encrypted entry, zeros otherwise.
    """

    flags: int
    header_bytes: int
    checksum: int
    salt: bytes

    @classmethod
    def parse(cls, data: Buffer) -> Self:
        """Parse a preamble.

        Raises:
            CorruptEntry: if these are not the first bytes of an entry of this version.
        """
        if len(data) < PREAMBLE.size:
            raise CorruptEntry(f"truncated: {len(data)} bytes")
        magic, version, flags, header_bytes, checksum, salt = PREAMBLE.unpack_from(data)
        if magic != MAGIC:
            raise CorruptEntry("not a stored chunk")
        if version != VERSION:
            raise CorruptEntry(f"format version {version}, this library reads {VERSION}")
        if flags not in (0, ENCRYPTED) or header_bytes > MAX_HEADER_BYTES:
            raise CorruptEntry("damaged preamble")
        return cls(flags, header_bytes, checksum, salt)


def encode(key: ChunkKey, chunk: ChunkKV, *, cipher: StoreCipher | None = None) -> list[Buffer]:
    """Serialise a chunk.

    Args:
        key: its key.
        chunk: in the format to store.
        cipher: encrypts it, if given.

    Returns:
        The entry's bytes, in parts to be written in order; blocks on the CPU are not copied.

    Raises:
        StoreError: if the chunk is so long that its header would be too large to be read.
    """
    salt, entry_cipher = cipher.new_entry() if cipher else (bytes(SALT_BYTES), None)
    block_fields: list[dict[str, Any]] = []
    body: list[Buffer] = []
    offset = end = 0  # of the block, from the first block's start; `end` of the pieces written so far
    number = 1  # of the piece; the header is part 0
    for name in chunk.names():
        tensor = chunk.blocks[name].detach().cpu().contiguous()
        body.append(bytes(offset - end))
        end = offset
        checksums = []
        for raw in _pieces(tensor):
            stored = raw if entry_cipher is None else entry_cipher.encrypt(number, raw)
            checksums.append(_checksum(stored))
            body.append(stored)
            end, number = end + len(stored), number + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = list(tensor.shape)
        block_fields.append({"name": name, "dtype": dtype, "shape": shape, "offset": offset, "xxh3": checksums})
        offset = aligned(end)
    header_fields = {
        "key": key.fields(),
        "tokens": chunk.n_tokens,
        "layers": chunk.n_layers,
        "dtype": str(chunk.dtype).removeprefix("torch."),
        "numbers": chunk.numbers,
        "probe_layers": [],  # earlier versions read it; it said which layers' keys come first
        "expires": chunk.expires,
        **chunk.notes,
        **({"extras": list(chunk.extras)} if chunk.extras else {}),
        "blocks": block_fields,
    }
    header = json.dumps(header_fields).encode()
    flags = 0
    if entry_cipher is not None:
        flags, header = ENCRYPTED, entry_cipher.encrypt(0, header, _associated_data(ENCRYPTED, salt))
    if len(header) > MAX_HEADER_BYTES:
        raise StoreError(f"a chunk of {chunk.n_tokens:,} tokens is too long to be stored; make passages shorter")
    checksum = _header_checksum(flags, salt, header)
    preamble = PREAMBLE.pack(MAGIC, VERSION, flags, len(header), checksum, salt)
    padding = bytes(aligned(PREAMBLE.size + len(header)) - PREAMBLE.size - len(header))
    return [preamble, header, padding, *body]


def read_header(preamble: Preamble, data: Buffer, cipher: StoreCipher | None) -> tuple[Header, EntryCipher | None]:
    """Check and parse a header.

    Args:
        preamble: of the entry.
        data: the header as stored.
        cipher: of the store, if it is encrypted.

    Returns:
        The header, and the cipher of the entry's blocks if they are encrypted.

    Raises:
        ForeignEntry: if the entry is under another secret, or encrypted and the store is not, or the other way round.
        CorruptEntry: if the header is damaged or makes no sense.
    """
    if len(data) != preamble.header_bytes:
        raise CorruptEntry("truncated header")
    if _header_checksum(preamble.flags, preamble.salt, data) != preamble.checksum:
        raise CorruptEntry("header checksum differs")
    if preamble.flags & ENCRYPTED and cipher is None:
        raise ForeignEntry("is encrypted and no secret was given")
    if cipher is not None and not preamble.flags & ENCRYPTED:
        raise ForeignEntry("is not encrypted, in a store that is")
    entry_cipher = cipher.entry(preamble.salt) if cipher is not None else None
    if entry_cipher is not None:
        try:
            data = entry_cipher.decrypt(0, data, _associated_data(preamble.flags, preamble.salt))
        except CorruptEntry as error:  # the checksum matches, so it is no damage but another secret
            raise ForeignEntry(str(error)) from error
    try:
        start = aligned(PREAMBLE.size + preamble.header_bytes)
        return parse_header(json.loads(bytes(data)), start, encrypted=entry_cipher is not None), entry_cipher
    except PARSE_ERRORS as error:
        raise CorruptEntry(f"header makes no sense: {str(error)[:100]}") from error


def check_piece(stored: Buffer, expected: str, name: str) -> None:
    """Raise `CorruptEntry` unless a piece has the checksum of the header."""
    if xxhash.xxh3_64_hexdigest(stored) != expected:
        raise CorruptEntry(f"checksum of block {name} differs")


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
    size = ROWS_PER_PIECE * (len(raw) // tensor.shape[0])
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def _associated_data(flags: int, salt: bytes) -> bytes:
    return struct.pack("<8sII", MAGIC, VERSION, flags) + salt


def _header_checksum(flags: int, salt: bytes, header: Buffer) -> int:
    state = xxhash.xxh3_64(_associated_data(flags, salt))
    state.update(struct.pack("<I", len(header)))
    state.update(header)
    return state.intdigest()


def _checksum(raw: Buffer) -> str:
    return xxhash.xxh3_64_hexdigest(raw)
