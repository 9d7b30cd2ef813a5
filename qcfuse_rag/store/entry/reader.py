"""Read an entry piece by piece, from a mapped file or from memory, checking each piece when it is first used."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.chunk import Blocks, ChunkKV
from qcfuse_rag.store.entry.codec import PREAMBLE, Preamble, check_piece, read_header
from qcfuse_rag.store.entry.encryption import EntryCipher, StoreCipher
from qcfuse_rag.store.entry.header import ROWS_PER_PIECE, BlockRange, Header
from qcfuse_rag.store.key import ChunkKey

MADV_POPULATE_READ, MADV_HUGEPAGE = 22, 14
"""Of Linux, the first from 5.14 on; Python has no name for it yet, and none for the other on other systems."""


class Source(Protocol):
    """Bytes of an entry."""

    @property
    def size(self) -> int:
        """How many there are."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return a range of them in writable memory, which stays valid as long as the view does.

        Raises:
            OSError: if they cannot be read.
        """


class MemorySource:
    """An entry that was read as a whole."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._view = memoryview(data if isinstance(data, bytearray) else bytearray(data))
        self.size = len(self._view)

    def read(self, start: int, stop: int) -> memoryview:
        """Return a range of the entry."""
        return self._view[start:stop]


class MappedFile:
    """An entry in a file, mapped into memory: what is read is the page cache itself.

    A disk error on a mapped page is a signal that ends the process. Pages are therefore asked for before they are
    touched (MADV_POPULATE_READ), which makes it an `OSError`; where the kernel cannot do that, they are read instead.
    Files are never changed once they have a name, so a mapping stays what it was even when the file is removed.

    Args:
        path: of the file.
        header_only: whether no more than its beginning will be read. Otherwise what is not in the page cache is read
            into large pages, which takes less time, and much less to map the file again.

    Raises:
        OSError: if the file cannot be opened.
        CorruptEntry: if it is empty.
    """

    def __init__(self, path: Path, *, header_only: bool = False) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(descriptor).st_size
            if self.size == 0:
                raise CorruptEntry("truncated: 0 bytes")
            # A private mapping: torch wants writable memory, the file must never change.
            self._map = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        self._path = path
        if not header_only:
            with suppress(OSError):  # a kernel that does not know large pages
                self._map.madvise(MADV_HUGEPAGE)

    def read(self, start: int, stop: int) -> memoryview:
        """Return a range of the file."""
        first = start - start % mmap.PAGESIZE
        try:
            self._map.madvise(MADV_POPULATE_READ, first, min(stop, self.size) - first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(error.errno, f"{self._path} cannot be read") from error
            return self._read_again(start, stop)
        return memoryview(self._map)[start:stop]

    def _read_again(self, start: int, stop: int) -> memoryview:
        with open(self._path, "rb") as file:
            file.seek(start)
            return memoryview(bytearray(file.read(stop - start)))


def open_header(source: Source, seal: StoreCipher | None = None) -> tuple[Header, EntryCipher | None]:
    """Read and check an entry's header, and that the entry is as long as it says.

    Raises:
        CorruptEntry: with what is wrong.
        OSError: if the bytes cannot be read.
    """
    preamble = Preamble.read(source.read(0, min(PREAMBLE.size, source.size)))
    stop = PREAMBLE.size + preamble.header_bytes
    header, entry = read_header(preamble, source.read(PREAMBLE.size, min(stop, source.size)), seal)
    if header.size != source.size:
        raise CorruptEntry(f"truncated: {source.size:,} bytes of {header.size:,}")
    return header, entry


def open_chunk(source: Source, seal: StoreCipher | None = None) -> tuple[Header, ChunkKV]:
    """Open an entry without reading its blocks.

    Raises:
        CorruptEntry: if its header is damaged; a damaged block raises the same when it is read.
        OSError: if the bytes cannot be read.
    """
    header, entry = open_header(source, seal)
    blocks = StoredBlocks(source, header, entry)
    about = (header.tokens, header.layers, header.dtype, header.numbers, header.probe_layers, header.expires)
    return header, ChunkKV(*about, blocks, header.context, header.facts, header.extras)


def check_key(found: ChunkKey, key: ChunkKey | None, address: str) -> None:
    """Raise `CorruptEntry` unless an entry is the one that was asked for, naming what differs.

    Args:
        found: the key in the entry.
        key: the key asked for, or None if only its address is known.
        address: its address.
    """
    if (key is None and found.address == address) or found == key:
        return
    raise CorruptEntry(f"entry of another chunk: {', '.join(key.differences(found) if key else ['address'])} differ")


class StoredBlocks(Blocks):
    """Blocks of an entry as tensors, checked when they are first read.

    Args:
        source: the entry.
        header: its header.
        entry: what decrypts it, or None.
    """

    def __init__(self, source: Source, header: Header, entry: EntryCipher | None) -> None:
        self._source, self._start, self._entry = source, header.start, entry
        self._blocks = {block.name: block for block in header.blocks}
        self._whole: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._whole:
            block = self._blocks[name]
            self._whole[name] = self._pieces(block, 0, len(block.checksums))
        return self._whole[name]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read, check and return rows of a block; of the others only those that share a piece with them are read."""
        if name in self._whole:
            return self._whole[name][start:stop]
        if start >= stop:
            block = self._blocks[name]
            return torch.empty((0, *block.shape[1:]), dtype=block.dtype)
        first = start // ROWS_PER_PIECE
        read = self._pieces(self._blocks[name], first, -(-stop // ROWS_PER_PIECE))
        return read[start - first * ROWS_PER_PIECE : stop - first * ROWS_PER_PIECE]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def _pieces(self, block: BlockRange, first: int, last: int) -> Tensor:
        """Read and check pieces `first <= i < last`, which lie one behind the other."""
        begin, end = block.range(first, last)
        stored = self._source.read(self._start + begin, self._start + end)
        size = block.piece_bytes
        for index in range(first, last):
            at = (index - first) * size
            check_piece(stored[at : at + size], block.checksums[index], block.name)
        raw = stored if self._entry is None else memoryview(self._decrypted(self._entry, block, first, stored))
        return torch.frombuffer(raw, dtype=block.dtype).reshape(-1, *block.shape[1:])

    @staticmethod
    def _decrypted(entry: EntryCipher, block: BlockRange, first: int, stored: memoryview) -> bytearray:
        clear, size = bytearray(), block.piece_bytes
        for number, at in enumerate(range(0, len(stored), size), start=block.first_piece + first):
            clear += entry.open(number, stored[at : at + size])
        return clear
