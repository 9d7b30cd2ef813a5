"""What the header of a stored chunk says: which blocks there are and where they lie. Nothing is believed unchecked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.store.chunk import RANKING, block_names
from qcfuse_rag.store.entry.encryption import TAG_BYTES
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.low_rank import RANKS, effective_rank
from qcfuse_rag.store.provenance import Context, Facts, parse_provenance
from qcfuse_rag.store.quantization import FORMATS, LOSSLESS, side_block

ALIGNMENT = 4096
ROWS_PER_PIECE = 128
HEADER_BYTES, BLOCK_HEADER_BYTES, CHECKSUM_BYTES = 700, 85, 20
"""What a header takes as JSON, about: by itself, for each block, and for each checksum."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.float8_e4m3fn)
}


class BlockRange(NamedTuple):
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
        context, facts, extras: see `ChunkKV`.
    """

    key: ChunkKey
    tokens: int
    layers: int
    dtype: torch.dtype
    numbers: str
    probe_layers: tuple[int, ...]
    expires: float | None
    blocks: tuple[BlockRange, ...]
    start: int
    sealed: bool
    context: Context | None
    facts: Facts
    extras: tuple[str, ...]

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
    context, facts, extras = parse_provenance(about)
    count = 1 + len(extras) + layers * (2 if numbers == LOSSLESS else 4)
    _require(numbers in FORMATS and len(found) == count, "numbers of blocks")
    _require(all(type(layer) is int and 0 <= layer < layers for layer in probe_layers), "probe layers")
    _require(len(set(probe_layers)) == len(probe_layers), "probe layers")
    _require(expires is None or (type(expires) in (int, float) and math.isfinite(expires)), "expiry")
    names = block_names(layers, numbers, probe_layers, extras)
    _require(found == names, "names of blocks")
    blocks: list[BlockRange] = []
    offset, number = 0, 1
    for one in described:
        name, shape, sums = one["name"], tuple(one["shape"]), tuple(one["xxh3"])
        _require(set(map(type, shape)) == {int} and min(shape) > 0 and max(shape) < 1 << 31, "shape")
        _require(_fits(name, shape, tokens, layers, numbers), "shape")
        _require(len(sums) == -(-shape[0] // ROWS_PER_PIECE), "checksums")
        _require(one["offset"] == offset, "offset")
        dtype = DTYPES[one["dtype"]]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        piece_bytes = ROWS_PER_PIECE * row_bytes + TAG_BYTES * sealed
        blocks.append(BlockRange(name, dtype, shape, offset, sums, number, row_bytes, piece_bytes))
        offset, number = aligned(blocks[-1].end), number + len(sums)
    _require(blocks[0].shape == (layers, tokens), "ranking")
    _require(
        all(block.shape[1:] == (1,) and block.dtype == torch.float32 for block in blocks[1 : 1 + len(extras)]), "extras"
    )
    if numbers in RANKS:
        _require_factors(blocks[1 + len(extras) :], numbers, tokens)
    return Header(
        ChunkKey.from_fields(about["key"]),
        tokens,
        layers,
        DTYPES[about["dtype"]],
        numbers,
        probe_layers,
        expires,
        tuple(blocks),
        start,
        sealed,
        context,
        facts,
        extras,
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
    return -(-size // ALIGNMENT) * ALIGNMENT


def _fits(name: str, shape: tuple[int, ...], tokens: int, layers: int, numbers: str) -> bool:
    """Return whether a block can have such a shape, as far as that is known before the others are."""
    if name == RANKING:
        return len(shape) == 2 and shape[0] == layers
    if not name.startswith(("key.", "value.")):
        return len(shape) == 2 and shape[0] == tokens
    if name.endswith(".basis"):
        return len(shape) == 3 and shape[0] <= RANKS[numbers]
    rows = 1 if name.startswith("key.") and name.endswith(".scale") else tokens
    return len(shape) == (2 if side_block(numbers) == "basis" else 3) and shape[0] == rows


def _require_factors(blocks: Sequence[BlockRange], numbers: str, tokens: int) -> None:
    """Require that each basis and the factor behind it have the rank that their format and sizes give."""
    for basis, factor in zip(blocks[::2], blocks[1::2], strict=True):
        rank = effective_rank(numbers, tokens, math.prod(basis.shape[1:]))
        _require(basis.shape[0] == rank == factor.shape[1] and basis.dtype.is_floating_point, "rank")
        _require(factor.dtype == basis.dtype, "rank")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} cannot be")
