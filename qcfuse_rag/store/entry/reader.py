"""Read an entry from a mapped file or from memory, checking each piece when it is first used."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.chunk import Blocks, ChunkKV
from qcfuse_rag.store.entry.codec import (
    PREAMBLE,
    ROWS_PER_PIECE,
    BlockRange,
    Header,
    Preamble,
    check_piece,
    read_header,
)
from qcfuse_rag.store.entry.encryption import EntryCipher, StoreCipher
from qcfuse_rag.store.key import ChunkKey

MAP_FAILED = ctypes.c_void_p(-1).value


class PrivateMapping:
    """The bytes of a file in writable memory. Changes stay in this process.

    The memory stays mapped as long as anything uses it, such as a view or a tensor made of a view.

    Attributes:
        view: the bytes.

    Raises:
        OSError: if the file cannot be mapped.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        address = _c_library().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
        if address == MAP_FAILED:
            raise _last_error()
        self._address: int = address
        memory = (ctypes.c_ubyte * size).from_address(address)
        # Not at exit: other threads may still use the memory then.
        weakref.finalize(memory, _c_library().munmap, address, size).atexit = False
        self.view = memoryview(memory).cast("B")

    def advise(self, advice: int, start: int, stop: int) -> None:
        """Advise the system about a range of the bytes, see `madvise`; `start` is a multiple of the page size.

        Raises:
            OSError: if the system does not know the advice, or a page of the range cannot be read.
        """
        if _c_library().madvise(self._address + start, stop - start, advice):
            raise _last_error()


@cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


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

    The file is not kept open, so a process may hold more chunks than it may have files open.

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
            # A private mapping: torch needs writable memory, but the file must never change.
            self._map = PrivateMapping(descriptor, self.size)
        finally:
            os.close(descriptor)
        self._path = path
        if not header_only:
            with suppress(OSError):  # a kernel without large pages
                self._map.advise(MADV_HUGEPAGE, 0, self.size)

    def read(self, start: int, stop: int) -> memoryview:
        """Return a range of the file."""
        first = start - start % mmap.PAGESIZE
        try:
            self._map.advise(MADV_POPULATE_READ, first, min(stop, self.size))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(error.errno, f"{self._path} cannot be read") from error
            return self._read_again(start, stop)
        return self._map.view[start:stop]

    def _read_again(self, start: int, stop: int) -> memoryview:
        with open(os.open(self._path, OPEN_FLAGS), "rb") as file:
            file.seek(start)
            return memoryview(bytearray(file.read(stop - start)))


def open_header(entry: EntryBytes, cipher: StoreCipher | None = None) -> tuple[Header, EntryCipher | None]:
    """Read and check an entry's header, and compare the entry's size with it.

    Raises:
        CorruptEntry: with what is wrong.
        OSError: if the bytes cannot be read.
    """
    preamble = Preamble.parse(entry.read(0, min(PREAMBLE.size, entry.size)))
    stop = PREAMBLE.size + preamble.header_bytes
    header, entry_cipher = read_header(preamble, entry.read(PREAMBLE.size, min(stop, entry.size)), cipher)
    if header.size != entry.size:
        raise CorruptEntry(f"truncated: {entry.size:,} bytes of {header.size:,}")
    return header, entry_cipher


def open_chunk(entry: EntryBytes, cipher: StoreCipher | None = None) -> tuple[Header, ChunkKV]:
    """Open an entry without reading its blocks.

    Raises:
        CorruptEntry: if its header is damaged; a damaged block raises the same when it is read.
        OSError: if the bytes cannot be read.
    """
    header, entry_cipher = open_header(entry, cipher)
    chunk = ChunkKV(
        header.tokens,
        header.layers,
        header.dtype,
        header.numbers,
        header.expires,
        StoredBlocks(entry, header, entry_cipher),
        header.notes,
        header.extras,
    )
    return header, chunk


def check_key(stored: ChunkKey, key: ChunkKey | None, address: str) -> None:
    """Raise `CorruptEntry`, with what differs, unless an entry has the key that was asked for."""
    if (key is None and stored.address == address) or stored == key:
        return
    raise CorruptEntry(f"entry of another chunk: {', '.join(key.differences(stored) if key else ['address'])} differ")


class StoredBlocks(Blocks):
    """The blocks of an entry as tensors, checked when they are first read."""

    def __init__(self, entry: EntryBytes, header: Header, cipher: EntryCipher | None) -> None:
        self._entry, self._start, self._cipher = entry, header.start, cipher
        self._blocks = {block.name: block for block in header.blocks}
        self._read: dict[str, Tensor] = {}  # blocks read as a whole

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            block = self._blocks[name]
            self._read[name] = self._read_pieces(block, 0, len(block.checksums))
        return self._read[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a block, reading and checking only the pieces they are in."""
        if name in self._read:
            return self._read[name][start:stop]
        if start >= stop:
            block = self._blocks[name]
            return torch.empty((0, *block.shape[1:]), dtype=block.dtype)
        first = start // ROWS_PER_PIECE
        rows = self._read_pieces(self._blocks[name], first, -(-stop // ROWS_PER_PIECE))
        return rows[start - first * ROWS_PER_PIECE : stop - first * ROWS_PER_PIECE]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def _read_pieces(self, block: BlockRange, start: int, stop: int) -> Tensor:
        """Read and check pieces `start <= i < stop`, which are stored one after the other."""
        begin, end = block.range(start, stop)
        stored = self._entry.read(self._start + begin, self._start + end)
        size = block.piece_bytes
        for index in range(start, stop):
            offset = (index - start) * size
            check_piece(stored[offset : offset + size], block.checksums[index], block.name)
        raw = stored if self._cipher is None else memoryview(self._decrypted(self._cipher, block, start, stored))
        return torch.frombuffer(raw, dtype=block.dtype).reshape(-1, *block.shape[1:])

    @staticmethod
    def _decrypted(cipher: EntryCipher, block: BlockRange, start: int, stored: memoryview) -> bytearray:
        clear, size = bytearray(), block.piece_bytes
        for number, offset in enumerate(range(0, len(stored), size), start=block.first_piece + start):
            clear += cipher.decrypt(number, stored[offset : offset + size])
        return clear
