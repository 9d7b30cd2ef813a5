"""What the header of a stored chunk says: which blocks there are and where they lie. Nothing is believed unchecked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from qcfuse_rag.model.rope import KVShape
from qcfuse_rag.store.chunk import RANKING, block_names
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.numbers import LOSSLESS, NUMBERS
from qcfuse_rag.store.seal import TAG_BYTES

ALIGNMENT = 4096
ROWS_PER_PIECE = 128
HEADER_BYTES, BLOCK_HEADER_BYTES, CHECKSUM_BYTES = 700, 85, 20
"""What a header takes as JSON, about: by itself, for each block, and for each checksum."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.float8_e4m3fn)
}


class Block(NamedTuple):
    """Where a tensor of an entry lies.

    Attributes:
        name: see `ChunkKV.blocks`.
        dtype: of its numbers, little endian.
        shape: row-major.
        offset: bytes from the first block's start, a multiple of 4096.
        checksums: XXH3-64 of each piece of 128 rows as stored.
        first_piece: number of its first piece among all of the entry's, from 1.
        row_bytes: bytes of one row.
        piece_bytes: bytes of every piece but the last, as stored.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    checksums: tuple[str, ...]
    first_piece: int
    row_bytes: int
    piece_bytes: int

    def range(self, first: int, last: int) -> tuple[int, int]:
        """Return the bytes of pieces `first <= i < last`, from the first block's start."""
        missing = max(0, last * ROWS_PER_PIECE - self.shape[0]) * self.row_bytes
        return self.offset + first * self.piece_bytes, self.offset + last * self.piece_bytes - missing

    @property
    def end(self) -> int:
        """Offset after the last piece."""
        return self.range(0, len(self.checksums))[1]


@dataclass(frozen=True, slots=True)
class Header:
    """What an entry says of itself.

    Attributes:
        key: whose entry it is.
        tokens, layers, dtype, numbers, probe_layers: see `ChunkKV`.
        expires: unix time from which on it must not be used, or None.
        blocks: in the order of the file.
        start: offset of the first block in the file.
        sealed: whether it is encrypted.
    """

    key: ChunkKey
    tokens: int
    layers: int
    dtype: torch.dtype
    numbers: str
    probe_layers: tuple[int, ...]
    expires: float | None
    blocks: tuple[Block, ...]
    start: int
    sealed: bool

    @property
    def size(self) -> int:
        """Bytes the whole entry must have."""
        return self.start + self.blocks[-1].end


def parse_header(about: Any, start: int, *, sealed: bool) -> Header:
    """Turn a header's JSON into a `Header`, checking that it is one and that its blocks can be as it says.

    Args:
        about: the parsed JSON.
        start: offset of the first block in the file.
        sealed: whether the entry is encrypted.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, OverflowError: if it is not a header.
    """
    tokens, layers, numbers, expires = about["tokens"], about["layers"], about["numbers"], about["expires"]
    described, probe_layers = about["blocks"], tuple(about["probe_layers"])
    found = [one["name"] for one in described]
    _require(all(type(count) is int and count > 0 for count in (tokens, layers)), "sizes")
    # Counts first: nothing is made in numbers that the header has only claimed.
    _require(numbers in NUMBERS and len(found) == 1 + layers * (2 if numbers == LOSSLESS else 4), "numbers of blocks")
    _require(all(type(layer) is int and 0 <= layer < layers for layer in probe_layers), "probe layers")
    _require(len(set(probe_layers)) == len(probe_layers), "probe layers")
    _require(expires is None or (type(expires) in (int, float) and math.isfinite(expires)), "expiry")
    names = block_names(layers, numbers, probe_layers)
    _require(found == names, "names of blocks")
    blocks: list[Block] = []
    offset, number = 0, 1
    for one in described:
        name, shape, sums = one["name"], tuple(one["shape"]), tuple(one["xxh3"])
        _require(set(map(type, shape)) == {int} and min(shape) > 0 and max(shape) < 1 << 31, "shape")
        _require(shape[0] == _rows(name, tokens, layers) and len(shape) == (2 if name == RANKING else 3), "shape")
        _require(len(sums) == -(-shape[0] // ROWS_PER_PIECE), "checksums")
        _require(one["offset"] == offset, "offset")
        dtype = DTYPES[one["dtype"]]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        piece_bytes = ROWS_PER_PIECE * row_bytes + TAG_BYTES * sealed
        blocks.append(Block(name, dtype, shape, offset, sums, number, row_bytes, piece_bytes))
        offset, number = aligned(blocks[-1].end), number + len(sums)
    _require(blocks[0].shape == (layers, tokens), "ranking")
    key = ChunkKey.from_fields(about["key"])
    return Header(
        key, tokens, layers, DTYPES[about["dtype"]], numbers, probe_layers, expires, tuple(blocks), start, sealed
    )


def entry_bytes(shapes: Sequence[KVShape], dtype: torch.dtype, numbers: str, tokens: int) -> int:
    """Return about how many bytes an entry takes, up to a few thousand, without making it.

    Args:
        shapes: cache sizes of each layer.
        dtype: of the model.
        numbers: format of the entry.
        tokens: length of the chunk.
    """
    sizes = [4 * len(shapes) * tokens]
    for shape in shapes:
        for kind, channels in (("key", shape.key_dim), ("value", shape.value_dim)):
            sizes.append(tokens * shape.kv_heads * channels * (dtype.itemsize if numbers == LOSSLESS else 1))
            if numbers != LOSSLESS:
                sizes.append(4 * shape.kv_heads * (channels if kind == "key" else tokens))
    checksums = len(sizes) * -(-tokens // ROWS_PER_PIECE)
    header = HEADER_BYTES + len(sizes) * BLOCK_HEADER_BYTES + checksums * CHECKSUM_BYTES
    return aligned(header) + sum(aligned(size) for size in sizes)


def aligned(size: int) -> int:
    """Return the next multiple of 4096."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rows(name: str, tokens: int, layers: int) -> int:
    if name == RANKING:
        return layers
    return 1 if name.startswith("key.") and name.endswith(".scale") else tokens


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} cannot be")
