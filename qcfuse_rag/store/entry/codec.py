"""The layout of a stored chunk; docs/reference/store-format.md describes it for other readers.

    offset 0    preamble, 64 bytes: magic, version, flags, header length, checksum, salt
    then        header, JSON, at most 4 MiB; says what the entry is and where its blocks are
    then        blocks, each at a multiple of 4096, in the order a fused prefill reads them

A block is cut along its first dimension into pieces with a checksum each, so that a range of tokens can be read and
checked alone. Nothing of an entry is believed before it is checked, sizes before anything is allocated by them.
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
from qcfuse_rag.store.provenance import provenance_fields

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
    def read(cls, data: Buffer) -> Self:
        """Parse a preamble.

        Raises:
            CorruptEntry: if this does not begin an entry of this version.
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


def encode(key: ChunkKey, chunk: ChunkKV, *, seal: StoreCipher | None = None) -> list[Buffer]:
    """Serialise a chunk.

    Args:
        key: its key.
        chunk: in the format of numbers to store.
        seal: encrypts it, if given.

    Returns:
        The entry's bytes in parts to be written one after the other, blocks uncopied where they lie on the CPU.

    Raises:
        StoreError: if the chunk is so long that its header would be refused.
    """
    salt, entry = seal.new_entry() if seal else (bytes(SALT_BYTES), None)
    described: list[dict[str, Any]] = []
    body: list[Buffer] = []
    offset = at = 0
    number = 1
    for name in chunk.names():
        tensor = chunk.blocks[name].detach().cpu().contiguous()
        body.append(bytes(offset - at))
        at = offset
        sums = []
        for raw in _pieces(tensor):
            stored = raw if entry is None else entry.close(number, raw)
            sums.append(_checksum(stored))
            body.append(stored)
            at, number = at + len(stored), number + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        described.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset, "xxh3": sums})
        offset = aligned(at)
    about = {
        "key": key.fields(),
        "tokens": chunk.n_tokens,
        "layers": chunk.n_layers,
        "dtype": str(chunk.dtype).removeprefix("torch."),
        "numbers": chunk.numbers,
        "probe_layers": list(chunk.probe_layers),
        "expires": chunk.expires,
        **provenance_fields(chunk.context, chunk.facts, chunk.extras),
        "blocks": described,
    }
    header = json.dumps(about).encode()
    flags = 0
    if entry is not None:
        flags, header = ENCRYPTED, entry.close(0, header, _context(ENCRYPTED, salt))
    if len(header) > MAX_HEADER_BYTES:
        raise StoreError(f"a chunk of {chunk.n_tokens:,} tokens is too long to be stored; make passages shorter")
    checksum = _header_checksum(flags, salt, header)
    preamble = PREAMBLE.pack(MAGIC, VERSION, flags, len(header), checksum, salt)
    padding = bytes(aligned(PREAMBLE.size + len(header)) - PREAMBLE.size - len(header))
    return [preamble, header, padding, *body]


def read_header(preamble: Preamble, data: Buffer, seal: StoreCipher | None) -> tuple[Header, EntryCipher | None]:
    """Check and parse a header.

    Args:
        preamble: what stands before it.
        data: the header as stored.
        seal: opens encrypted entries.

    Returns:
        The header, and what opens the blocks if they are encrypted.

    Raises:
        ForeignEntry: if it is not under this secret, or has none and should.
        CorruptEntry: if it is damaged or makes no sense.
    """
    if len(data) != preamble.header_bytes:
        raise CorruptEntry("truncated header")
    if _header_checksum(preamble.flags, preamble.salt, data) != preamble.checksum:
        raise CorruptEntry("header checksum differs")
    if preamble.flags & ENCRYPTED and seal is None:
        raise ForeignEntry("is encrypted and no secret was given")
    if seal is not None and not preamble.flags & ENCRYPTED:
        raise ForeignEntry("is not encrypted, in a store that is")
    entry = seal.entry(preamble.salt) if seal is not None else None
    if entry is not None:
        try:
            data = entry.open(0, data, _context(preamble.flags, preamble.salt))
        except CorruptEntry as error:  # its checksum is right: whatever this is, it did not break by itself
            raise ForeignEntry(str(error)) from error
    try:
        start = aligned(PREAMBLE.size + preamble.header_bytes)
        return parse_header(json.loads(bytes(data)), start, sealed=entry is not None), entry
    except PARSE_ERRORS as error:
        raise CorruptEntry(f"header makes no sense: {str(error)[:100]}") from error


def check_piece(stored: Buffer, expected: str, name: str) -> None:
    """Raise `CorruptEntry` unless a piece is what was written."""
    if xxhash.xxh3_64_hexdigest(stored) != expected:
        raise CorruptEntry(f"checksum of block {name} differs")


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
    size = ROWS_PER_PIECE * (len(raw) // tensor.shape[0])
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def _context(flags: int, salt: bytes) -> bytes:
    return struct.pack("<8sII", MAGIC, VERSION, flags) + salt


def _header_checksum(flags: int, salt: bytes, header: Buffer) -> int:
    state = xxhash.xxh3_64(_context(flags, salt))
    state.update(struct.pack("<I", len(header)))
    state.update(header)
    return state.intdigest()


def _checksum(raw: Buffer) -> str:
    return xxhash.xxh3_64_hexdigest(raw)
