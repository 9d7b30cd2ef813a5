"""Write and read a stored chunk; docs/reference/store-format.md describes the layout for other readers.

    offset 0    preamble, 64 bytes: magic, version, flags, header length, checksum, salt
    then        header, JSON, at most 4 MiB: the key, the format, and where the blocks are
    then        blocks, each at a multiple of 4096, in the order a fused prefill reads them

A block is divided along its first dimension into pieces with a checksum each, so that a range of tokens can be read and
checked alone. Every part is checked before it is used, and sizes before memory is allocated for them.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from qcfuse_rag.errors import CorruptEntry, ForeignEntry, StoreError
from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.store.chunk import HEADER_FIELDS, RANKING, Blocks, ChunkKV, block_names
from qcfuse_rag.store.entry.encryption import SALT_BYTES, TAG_BYTES, EntryCipher, StoreCipher
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.quantization import FORMATS, LOSSLESS, RANKS, effective_rank, side_block

FILE_ALIGNMENT = 4096
ROWS_PER_PIECE = 128
HEADER_BYTES, BLOCK_HEADER_BYTES, CHECKSUM_BYTES = 700, 85, 20
"""About how many bytes a header takes as JSON: by itself, for each block, and for each checksum."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8)
}


class BlockRange(NamedTuple):
    """The bytes of one tensor in an entry."""

    name: str
    dtype: torch.dtype  # of its numbers, little endian
    shape: tuple[int, ...]  # of the tensor, row-major
    offset: int  # bytes from the first block's start, a multiple of 4096
    checksums: tuple[str, ...]  # XXH3-64 of each piece of 128 rows as stored
    first_piece: int  # number of its first piece among all pieces of the entry, from 1
    row_bytes: int  # bytes of one row
    piece_bytes: int  # bytes of every piece but the last one, as stored

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes of pieces `start <= i < stop`, from the first block's start."""
        missing = max(0, stop * ROWS_PER_PIECE - self.shape[0]) * self.row_bytes
        return self.offset + start * self.piece_bytes, self.offset + stop * self.piece_bytes - missing

    @property
    def end(self) -> int:
        """Offset after the last piece."""
        return self.range(0, len(self.checksums))[1]


def _parse_header(fields: Any, entry: EntryBytes, start: int, cipher: EntryCipher | None) -> tuple[ChunkKey, ChunkKV]:
    """Return the key and the chunk of a header's JSON, after checking it and the sizes and places of its blocks.

    One of `PARSE_ERRORS` says that it is no header.
    """
    tokens, layers, kv_dtype, expires = fields["tokens"], fields["layers"], fields["numbers"], fields["expires"]
    block_fields, extra_names = fields["blocks"], fields.get("extras", [])
    names = [block["name"] for block in block_fields]
    _require(all(type(count) is int and count > 0 for count in (tokens, layers)), "sizes")
    # The number of blocks is checked first: the expected names are not made for as many layers as a header claims.
    _require(type(extra_names) is list and ("extras" not in fields or len(extra_names) > 0), "extras")
    notes, extras = {name: value for name, value in fields.items() if name not in HEADER_FIELDS}, tuple(extra_names)
    count = 1 + len(extras) + layers * (2 if kv_dtype == LOSSLESS else 4)
    _require(kv_dtype in FORMATS, f"kv_dtype {kv_dtype!r}")
    _require(len(names) == count, "numbers of blocks")
    _require(expires is None or (type(expires) in (int, float) and math.isfinite(expires)), "expiry")
    # Earlier versions ordered layers otherwise.
    expected, first = block_names(layers, kv_dtype, extras), 1 + len(extras)
    _require(names[:first] == expected[:first] and sorted(names) == sorted(expected), "names of blocks")
    blocks: list[BlockRange] = []
    offset, number = 0, 1
    for block in block_fields:
        name, shape, checksums = block["name"], tuple(block["shape"]), tuple(block["xxh3"])
        _require(set(map(type, shape)) == {int} and min(shape) > 0 and max(shape) < 1 << 31, "shape")
        _require(_fits(name, shape, tokens, layers, kv_dtype), "shape")
        _require(len(checksums) == -(-shape[0] // ROWS_PER_PIECE), "checksums")
        _require(block["offset"] == offset, "offset")
        dtype = DTYPES[block["dtype"]]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        piece_bytes = ROWS_PER_PIECE * row_bytes + TAG_BYTES * (cipher is not None)
        blocks.append(BlockRange(name, dtype, shape, offset, checksums, number, row_bytes, piece_bytes))
        offset, number = aligned(blocks[-1].end), number + len(checksums)
    _require(blocks[0].shape == (layers, tokens), "ranking")
    for extra in blocks[1 : 1 + len(extras)]:
        _require(extra.shape[1:] == (1,) and extra.dtype == torch.float32, "extras")
    if kv_dtype in RANKS:
        _require_factors({block.name: block for block in blocks}, kv_dtype, tokens)
    stored = StoredBlocks(entry, start, blocks, cipher)
    chunk = ChunkKV(tokens, layers, DTYPES[fields["dtype"]], kv_dtype, expires, stored, notes, extras)
    return ChunkKey.from_fields(fields["key"]), chunk


def entry_bytes(shapes: Sequence[KVShape], dtype: torch.dtype, kv_dtype: str, tokens: int) -> int:
    """Return the size of an entry in bytes, accurate to a few thousand, without making it."""
    sizes = [4 * len(shapes) * tokens]
    for shape in shapes:
        for kind, dim in (("key", shape.key_dim), ("value", shape.value_dim)):
            channels = shape.kv_heads * dim
            if kv_dtype in RANKS:
                rank = effective_rank(kv_dtype, tokens, channels)
                sizes += [rank * tokens * dtype.itemsize, rank * channels * dtype.itemsize]
            elif kv_dtype == LOSSLESS:
                sizes.append(tokens * channels * dtype.itemsize)
            else:
                sizes += [tokens * channels, 4 * (channels if kind == "key" else tokens * shape.kv_heads)]
    checksums = len(sizes) * -(-tokens // ROWS_PER_PIECE)
    header = HEADER_BYTES + len(sizes) * BLOCK_HEADER_BYTES + checksums * CHECKSUM_BYTES
    return aligned(header) + sum(aligned(size) for size in sizes)


def aligned(size: int) -> int:
    """Return the next multiple of 4096."""
    return -(-size // FILE_ALIGNMENT) * FILE_ALIGNMENT


def _fits(name: str, shape: tuple[int, ...], tokens: int, layers: int, kv_dtype: str) -> bool:
    """Return whether a block can have such a shape, as far as can be said before the other blocks are parsed."""
    if name == RANKING:
        return len(shape) == 2 and shape[0] == layers
    if not name.startswith(("key.", "value.")):
        return len(shape) == 2 and shape[0] == tokens
    if name.endswith(".basis"):
        return len(shape) == 3 and shape[0] <= RANKS[kv_dtype]
    rows = 1 if name.startswith("key.") and name.endswith(".scale") else tokens
    return len(shape) == (2 if side_block(kv_dtype) == "basis" else 3) and shape[0] == rows


def _require_factors(blocks: Mapping[str, BlockRange], kv_dtype: str, tokens: int) -> None:
    """Require that each basis and its factor have the rank of their format and sizes."""
    for basis in [block for name, block in blocks.items() if name.endswith(".basis")]:
        factor = blocks[basis.name.removesuffix(".basis")]
        rank = effective_rank(kv_dtype, tokens, math.prod(basis.shape[1:]))
        _require(basis.shape[0] == rank == factor.shape[1] and basis.dtype.is_floating_point, "rank")
        _require(factor.dtype == basis.dtype, "rank")


def _require(condition: bool, field: str) -> None:
    if not condition:
        raise ValueError(f"invalid {field}")


MAGIC = b"QCFUSEKV"
VERSION = 2
ENCRYPTED = 1
MAX_HEADER_BYTES = 4 << 20
PREAMBLE = struct.Struct(f"<8sIII4xQ{SALT_BYTES}s")
"""Magic, version, flags (1 if the entry is encrypted), length of the header, checksum (XXH3-64 over magic, version,
flags, salt, header length and header as stored), and salt: random bytes of an encrypted entry, zeros otherwise."""
PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
Buffer = bytes | bytearray | memoryview


def encode(key: ChunkKey, chunk: ChunkKV, *, cipher: StoreCipher | None = None) -> list[Buffer]:
    """Serialise a chunk; raises `StoreError` if the chunk is so long that its header would be too large to be read."""
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
        "numbers": chunk.kv_dtype,
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


def _read_header(entry: EntryBytes, cipher: StoreCipher | None) -> tuple[bytes, int, EntryCipher | None]:
    """Return an entry's header as JSON, where it ends, and the cipher of its blocks, after checking its bytes."""
    data = entry.read(0, min(PREAMBLE.size, entry.size))
    if len(data) < PREAMBLE.size:
        raise CorruptEntry(f"truncated: {len(data)} bytes")
    magic, version, flags, header_bytes, checksum, salt = PREAMBLE.unpack_from(data)
    if magic != MAGIC:
        raise CorruptEntry("not a stored chunk")
    if version != VERSION:
        raise CorruptEntry(f"format version {version}, this library reads {VERSION}")
    if flags not in (0, ENCRYPTED) or header_bytes > MAX_HEADER_BYTES:
        raise CorruptEntry("damaged preamble")
    stop = PREAMBLE.size + header_bytes
    header = bytes(entry.read(PREAMBLE.size, min(stop, entry.size)))
    if len(header) != header_bytes:
        raise CorruptEntry("truncated header")
    if _header_checksum(flags, salt, header) != checksum:
        raise CorruptEntry("header checksum differs")
    if cipher is None and flags & ENCRYPTED:
        raise ForeignEntry("is encrypted and no secret was given")
    if cipher is None:
        return header, stop, None
    if not flags & ENCRYPTED:
        raise ForeignEntry("is not encrypted, in a store that is")
    entry_cipher = cipher.entry(salt)
    try:
        return bytes(entry_cipher.decrypt(0, header, _associated_data(flags, salt))), stop, entry_cipher
    except CorruptEntry as error:  # the checksum matches, so it is no damage but another secret
        raise ForeignEntry(str(error)) from error


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


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


MADV_POPULATE_READ, MADV_HUGEPAGE = 22, 14
"""Linux's numbers, the first from Linux 5.14 on. Python does not name the first, and the second on Linux only."""

OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class EntryBytes(Protocol):
    """The bytes of an entry."""

    @property
    def size(self) -> int:
        """Their number."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return a range of the bytes in writable memory, which stays valid as long as the view.

        Raises:
            OSError: if the bytes cannot be read.
        """


class BytesInMemory:
    """An entry whose bytes are in memory."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._view = memoryview(data if isinstance(data, bytearray) else bytearray(data))
        self.size = len(self._view)

    def read(self, start: int, stop: int) -> memoryview:
        """Return a range of the entry."""
        return self._view[start:stop]


class MappedFile:
    """An entry in a file that is mapped into memory, so that reading it reads the page cache directly.

    The file is not kept open, so a process may hold more chunks than it may have files open. It stays mapped as long as
    anything uses its bytes, such as a tensor made of them, and changes of the bytes stay in this process.

    A disk error on a mapped page is a signal that ends the process. Pages are therefore requested before they are
    touched (MADV_POPULATE_READ), which turns the error into an `OSError`; a kernel that cannot do that reads the file
    instead. Files never change once they have their names, so a mapping stays valid even if the file is removed.

    Args:
        path: of the file.
        header_only: whether only its beginning will be read. Otherwise pages that are not cached are read as large
            pages, which is faster, and much faster when the file is mapped again.

    Raises:
        OSError: if the file cannot be opened, or is a link.
        CorruptEntry: if it is empty.
    """

    def __init__(self, path: Path, *, header_only: bool = False) -> None:
        descriptor = os.open(path, OPEN_FLAGS)
        try:
            self.size = os.fstat(descriptor).st_size
            if self.size == 0:
                raise CorruptEntry("truncated: 0 bytes")
            name = f"/dev/fd/{descriptor}" if os.path.exists("/dev/fd") else str(path)  # a sandbox may have no /proc
            memory = torch.from_file(name, shared=False, size=self.size, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(f"{path} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._path, self._address, self._view = path, memory.data_ptr(), memory.numpy().data
        if not header_only:
            with suppress(OSError):  # a kernel without large pages
                self._advise(MADV_HUGEPAGE, 0, self.size)

    def read(self, start: int, stop: int) -> memoryview:
        """Return a range of the file."""
        first = start - start % mmap.PAGESIZE
        try:
            self._advise(MADV_POPULATE_READ, first, min(stop, self.size))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(error.errno, f"{self._path} cannot be read") from error
            with open(os.open(self._path, OPEN_FLAGS), "rb") as file:
                file.seek(start)
                return memoryview(bytearray(file.read(stop - start)))
        return self._view[start:stop]

    def _advise(self, advice: int, start: int, stop: int) -> None:
        if _madvise()(self._address + start, stop - start, advice):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def open_chunk(entry: EntryBytes, cipher: StoreCipher | None = None) -> tuple[ChunkKey, ChunkKV]:
    """Open an entry without reading its blocks.

    Raises:
        ForeignEntry: if the entry is under another secret, or encrypted and the store is not, or the other way round.
        CorruptEntry: if its header is damaged; a damaged block raises the same when it is read.
        OSError: if the bytes cannot be read.
    """
    header, stop, entry_cipher = _read_header(entry, cipher)
    try:
        return _parse_header(json.loads(header), entry, aligned(stop), entry_cipher)
    except PARSE_ERRORS as error:
        raise CorruptEntry(f"header makes no sense: {str(error)[:100]}") from error


def check_key(stored: ChunkKey, key: ChunkKey | None, address: str) -> None:
    """Raise `CorruptEntry`, with what differs, unless an entry has the key that was asked for."""
    if (key is None and stored.address == address) or stored == key:
        return
    raise CorruptEntry(f"entry of another chunk: {', '.join(key.differences(stored) if key else ['address'])} differ")


class StoredBlocks(Blocks):
    """The blocks of an entry from the offset `start` on, as tensors, checked when they are first read."""

    def __init__(self, entry: EntryBytes, start: int, blocks: Sequence[BlockRange], cipher: EntryCipher | None) -> None:
        if entry.size != (size := start + blocks[-1].end):
            raise CorruptEntry(f"truncated: {entry.size:,} bytes of {size:,}")
        self._entry, self.start, self._cipher = entry, start, cipher
        self.ranges = {block.name: block for block in blocks}
        self._read: dict[str, Tensor] = {}  # blocks read as a whole

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            block = self.ranges[name]
            self._read[name] = self._read_pieces(block, 0, len(block.checksums))
        return self._read[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block, reading and checking only the pieces they are in."""
        if name in self._read:
            return self._read[name][start:stop]
        if start >= stop:
            block = self.ranges[name]
            return torch.empty((0, *block.shape[1:]), dtype=block.dtype)
        first = start // ROWS_PER_PIECE
        rows = self._read_pieces(self.ranges[name], first, -(-stop // ROWS_PER_PIECE))
        return rows[start - first * ROWS_PER_PIECE : stop - first * ROWS_PER_PIECE]

    def _read_pieces(self, block: BlockRange, start: int, stop: int) -> Tensor:
        """Read and check pieces `start <= i < stop`, which are stored one after the other."""
        begin, end = block.range(start, stop)
        stored = self._entry.read(self.start + begin, self.start + end)
        size = block.piece_bytes
        for index in range(start, stop):
            offset = (index - start) * size
            if _checksum(stored[offset : offset + size]) != block.checksums[index]:
                raise CorruptEntry(f"checksum of block {block.name} differs")
        raw = stored if self._cipher is None else memoryview(self._decrypted(self._cipher, block, start, stored))
        return torch.frombuffer(raw, dtype=block.dtype).reshape(-1, *block.shape[1:])

    @staticmethod
    def _decrypted(cipher: EntryCipher, block: BlockRange, start: int, stored: memoryview) -> bytearray:
        clear, size = bytearray(), block.piece_bytes
        for number, offset in enumerate(range(0, len(stored), size), start=block.first_piece + start):
            clear += cipher.decrypt(number, stored[offset : offset + size])
        return clear
