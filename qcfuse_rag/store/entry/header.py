"""Parse and check the header of a stored chunk, which lists its blocks and where they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.store.chunk import HEADER_FIELDS, RANKING, block_names, check_notes
from qcfuse_rag.store.entry.encryption import TAG_BYTES
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.quantization import FORMATS, LOSSLESS, RANKS, effective_rank, side_block

FILE_ALIGNMENT = 4096
ROWS_PER_PIECE = 128
HEADER_BYTES, BLOCK_HEADER_BYTES, CHECKSUM_BYTES = 700, 85, 20
"""About how many bytes a header takes as JSON: by itself, for each block, and for each checksum."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.float8_e4m3fn)
}


class BlockRange(NamedTuple):
    """The bytes of one tensor in an entry.

    Attributes:
        name: see `ChunkKV.blocks`.
        dtype: of its numbers, little endian.
        shape: of the tensor, row-major.
        offset: bytes from the first block's start, a multiple of 4096.
        checksums: XXH3-64 of each piece of 128 rows as stored.
        first_piece: number of its first piece among all pieces of the entry, from 1.
        row_bytes: bytes of one row.
        piece_bytes: bytes of every piece but the last one, as stored.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    checksums: tuple[str, ...]
    first_piece: int
    row_bytes: int
    piece_bytes: int

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes of pieces `start <= i < stop`, from the first block's start."""
        missing = max(0, stop * ROWS_PER_PIECE - self.shape[0]) * self.row_bytes
        return self.offset + start * self.piece_bytes, self.offset + stop * self.piece_bytes - missing

    @property
    def end(self) -> int:
        """Offset after the last piece."""
        return self.range(0, len(self.checksums))[1]


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of an entry.

    Attributes:
        key: of the entry.
        tokens, layers, dtype, numbers: see `ChunkKV`.
        expires: unix time from which on it must not be used, or None.
        blocks: in the order of the file.
        start: offset of the first block in the file.
        encrypted: whether it is encrypted.
        notes, extras: see `ChunkKV`.
    """

    key: ChunkKey
    tokens: int
    layers: int
    dtype: torch.dtype
    numbers: str
    expires: float | None
    blocks: tuple[BlockRange, ...]
    start: int
    encrypted: bool
    notes: Mapping[str, Any]
    extras: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes the whole entry must have."""
        return self.start + self.blocks[-1].end


def parse_header(fields: Any, start: int, *, encrypted: bool) -> Header:
    """Turn a header's JSON into a `Header`, after checking it and the sizes and places of its blocks.

    Args:
        fields: the parsed JSON.
        start: offset of the first block in the file.
        encrypted: whether the entry is encrypted.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, OverflowError: if it is not a header.
    """
    tokens, layers, numbers, expires = fields["tokens"], fields["layers"], fields["numbers"], fields["expires"]
    block_fields, extra_names = fields["blocks"], fields.get("extras", [])
    names = [block["name"] for block in block_fields]
    _require(all(type(count) is int and count > 0 for count in (tokens, layers)), "sizes")
    # The number of blocks is checked first: the expected names are not made for as many layers as a header claims.
    _require(type(extra_names) is list and ("extras" not in fields or len(extra_names) > 0), "extras")
    notes, extras = {name: value for name, value in fields.items() if name not in HEADER_FIELDS}, tuple(extra_names)
    check_notes(notes, extras)
    count = 1 + len(extras) + layers * (2 if numbers == LOSSLESS else 4)
    _require(numbers in FORMATS and len(names) == count, "numbers of blocks")
    _require(expires is None or (type(expires) in (int, float) and math.isfinite(expires)), "expiry")
    expected, first = block_names(layers, numbers, extras), 1 + len(extras)  # earlier versions ordered layers otherwise
    _require(names[:first] == expected[:first] and sorted(names) == sorted(expected), "names of blocks")
    blocks: list[BlockRange] = []
    offset, number = 0, 1
    for block in block_fields:
        name, shape, checksums = block["name"], tuple(block["shape"]), tuple(block["xxh3"])
        _require(set(map(type, shape)) == {int} and min(shape) > 0 and max(shape) < 1 << 31, "shape")
        _require(_fits(name, shape, tokens, layers, numbers), "shape")
        _require(len(checksums) == -(-shape[0] // ROWS_PER_PIECE), "checksums")
        _require(block["offset"] == offset, "offset")
        dtype = DTYPES[block["dtype"]]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        piece_bytes = ROWS_PER_PIECE * row_bytes + TAG_BYTES * encrypted
        blocks.append(BlockRange(name, dtype, shape, offset, checksums, number, row_bytes, piece_bytes))
        offset, number = aligned(blocks[-1].end), number + len(checksums)
    _require(blocks[0].shape == (layers, tokens), "ranking")
    for extra in blocks[1 : 1 + len(extras)]:
        _require(extra.shape[1:] == (1,) and extra.dtype == torch.float32, "extras")
    if numbers in RANKS:
        _require_factors({block.name: block for block in blocks}, numbers, tokens)
    return Header(
        ChunkKey.from_fields(fields["key"]),
        tokens,
        layers,
        DTYPES[fields["dtype"]],
        numbers,
        expires,
        tuple(blocks),
        start,
        encrypted,
        notes,
        extras,
    )


def entry_bytes(shapes: Sequence[KVShape], dtype: torch.dtype, numbers: str, tokens: int) -> int:
    """Return the size of an entry in bytes, accurate to a few thousand, without making it.

    Args:
        shapes: cache sizes of each layer.
        dtype: the model's dtype.
        numbers: format of the entry.
        tokens: length of the chunk.
    """
    sizes = [4 * len(shapes) * tokens]
    for shape in shapes:
        for kind, dim in (("key", shape.key_dim), ("value", shape.value_dim)):
            channels = shape.kv_heads * dim
            if numbers in RANKS:
                rank = effective_rank(numbers, tokens, channels)
                sizes += [rank * tokens * dtype.itemsize, rank * channels * dtype.itemsize]
            elif numbers == LOSSLESS:
                sizes.append(tokens * channels * dtype.itemsize)
            else:
                sizes += [tokens * channels, 4 * (channels if kind == "key" else tokens * shape.kv_heads)]
    checksums = len(sizes) * -(-tokens // ROWS_PER_PIECE)
    header = HEADER_BYTES + len(sizes) * BLOCK_HEADER_BYTES + checksums * CHECKSUM_BYTES
    return aligned(header) + sum(aligned(size) for size in sizes)


def aligned(size: int) -> int:
    """Return the next multiple of 4096."""
    return -(-size // FILE_ALIGNMENT) * FILE_ALIGNMENT


def _fits(name: str, shape: tuple[int, ...], tokens: int, layers: int, numbers: str) -> bool:
    """Return whether a block can have such a shape, as far as can be said before the other blocks are parsed."""
    if name == RANKING:
        return len(shape) == 2 and shape[0] == layers
    if not name.startswith(("key.", "value.")):
        return len(shape) == 2 and shape[0] == tokens
    if name.endswith(".basis"):
        return len(shape) == 3 and shape[0] <= RANKS[numbers]
    rows = 1 if name.startswith("key.") and name.endswith(".scale") else tokens
    return len(shape) == (2 if side_block(numbers) == "basis" else 3) and shape[0] == rows


def _require_factors(blocks: Mapping[str, BlockRange], numbers: str, tokens: int) -> None:
    """Require that each basis and its factor have the rank of their format and sizes."""
    for basis in [block for name, block in blocks.items() if name.endswith(".basis")]:
        factor = blocks[basis.name.removesuffix(".basis")]
        rank = effective_rank(numbers, tokens, math.prod(basis.shape[1:]))
        _require(basis.shape[0] == rank == factor.shape[1] and basis.dtype.is_floating_point, "rank")
        _require(factor.dtype == basis.dtype, "rank")


def _require(condition: bool, field: str) -> None:
    if not condition:
        raise ValueError(f"invalid {field}")
