"""The file format: what is written is read back, ranges read no more than they must, and nothing wrong is believed."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from qcfuse_rag import CorruptEntry, StoreError
from qcfuse_rag.store import format as entry_format
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.format import encode
from qcfuse_rag.store.layout import Header
from qcfuse_rag.store.numbers import FORMATS, NUMBERS, compress
from qcfuse_rag.store.reader import MemorySource, open_chunk
from qcfuse_rag.store.seal import Seal
from qcfuse_rag.store.testing import DTYPES, assert_same, example_chunk, example_key, example_patch

SECRET = bytes(range(32))
SEALS = {"plain": None, "sealed": Seal(SECRET)}


def written(chunk: ChunkKV, seal: Seal | None = None) -> bytes:
    return b"".join(encode(example_key(), chunk, seal=seal))


def opened(data: bytes, seal: Seal | None = None) -> tuple[Header, ChunkKV]:
    return open_chunk(MemorySource(data), seal)


class CountingSource(MemorySource):
    """Remembers which ranges were read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.ranges: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> memoryview:
        self.ranges.append((start, stop))
        return super().read(start, stop)


@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_is_read_back(dtype: torch.dtype, numbers: str, seal: Seal | None) -> None:
    chunk = compress(example_chunk(n_tokens=300, dtype=dtype), numbers)
    header, found = opened(written(chunk, seal), seal)
    assert header.key == example_key()
    assert header.sealed == (seal is not None)
    assert_same(found, chunk)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape_is_read_back_whole_and_in_ranges(data: st.DataObject) -> None:
    n_tokens, layers, heads = (data.draw(st.integers(1, most)) for most in (300, 3, 3))
    key_dim, value_dim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    dtype, seal = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(list(SEALS.values())))
    probe_layers = tuple(data.draw(st.lists(st.integers(0, layers - 1), unique=True)))
    keys = [torch.randn(heads, n_tokens, key_dim).to(dtype) for _ in range(layers)]
    values = [torch.randn(heads, n_tokens, value_dim).to(dtype) for _ in range(layers)]
    ranking = torch.stack([torch.randperm(n_tokens) for _ in range(layers)])
    chunk = compress(ChunkKV.of(keys, values, ranking, probe_layers=probe_layers), data.draw(st.sampled_from(FORMATS)))
    _, found = opened(written(chunk, seal), seal)
    start = data.draw(st.integers(0, n_tokens))
    stop = data.draw(st.integers(start, n_tokens))
    for part, whole in zip(found.layer(layers - 1, start, stop), chunk.layer(layers - 1), strict=True):
        near = 0.0 if chunk.numbers in NUMBERS else 1e-4 + 4 * torch.finfo(dtype).eps  # products are rounded by shape
        assert torch.allclose(part.float(), whole[:, start:stop].float(), atol=near, rtol=near)
    assert_same(found, chunk)


@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_every_block_starts_at_a_multiple_of_4096_behind_the_one_before(numbers: str, seal: Seal | None) -> None:
    header, _ = opened(written(compress(example_chunk(n_tokens=300), numbers), seal), seal)
    ends = [0, *(block.end for block in header.blocks)]
    assert header.start % 4096 == 0
    for block, end in zip(header.blocks, ends, strict=False):
        assert block.offset % 4096 == 0
        assert end <= block.offset < end + 4096


def test_what_a_probe_reads_comes_first() -> None:
    header, _ = opened(written(replace(example_chunk(), probe_layers=(2, 1))))
    names = [block.name for block in header.blocks]
    assert names == ["ranking", "key.2", "key.1", "key.0", "value.0", "value.1", "value.2"]


def test_scales_stand_before_the_numbers_they_are_for() -> None:
    header, _ = opened(written(compress(example_chunk(), "int8")))
    assert [block.name for block in header.blocks][:5] == ["ranking", "key.1.scale", "key.1", "key.0.scale", "key.0"]


def test_the_time_at_which_it_expires_is_kept() -> None:
    header, found = opened(written(example_chunk().until(4e9)))
    assert (header.expires, found.expires) == (4e9, 4e9)


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [((0, 128), (0, 1)), ((130, 140), (1, 2)), ((127, 129), (0, 2)), ((128, 256), (1, 2)), ((299, 300), (2, 3))],
)
@pytest.mark.parametrize(("seal", "tag"), [(None, 0), (Seal(SECRET), 16)], ids=SEALS)
def test_a_range_of_rows_reads_its_pieces_and_no_others(
    seal: Seal | None, tag: int, rows: tuple[int, int], pieces: tuple[int, int]
) -> None:
    source = CountingSource(written(example_chunk(n_tokens=300), seal))
    header, chunk = open_chunk(source, seal)
    [block] = [block for block in header.blocks if block.name == "key.2"]
    source.ranges.clear()
    assert torch.equal(chunk.blocks.rows("key.2", *rows), example_chunk(n_tokens=300).blocks["key.2"][slice(*rows)])
    piece = 128 * (2 * 8 * 4) + tag
    last = 300 * (2 * 8 * 4) + 3 * tag
    begin = header.start + block.offset
    assert source.ranges == [(begin + pieces[0] * piece, begin + min(pieces[1] * piece, last))]


def test_opening_reads_no_block() -> None:
    source = CountingSource(written(example_chunk()))
    header, _ = open_chunk(source)
    assert max(stop for _, stop in source.ranges) <= header.start


def test_no_rows_read_nothing() -> None:
    source = CountingSource(written(example_chunk()))
    _, chunk = open_chunk(source)
    source.ranges.clear()
    assert chunk.blocks.rows("key.0", 0, 0).shape == (0, 2, 8)
    assert source.ranges == []


@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
def test_a_damaged_piece_spoils_its_own_rows_and_no_others(seal: Seal | None) -> None:
    data = bytearray(written(example_chunk(n_tokens=300), seal))
    header, _ = opened(bytes(data), seal)
    [block] = [block for block in header.blocks if block.name == "value.0"]
    data[header.start + block.range(1, 2)[0]] ^= 1
    _, chunk = opened(bytes(data), seal)
    assert torch.equal(chunk.layer(0, 0, 128)[1], example_chunk(n_tokens=300).layer(0, 0, 128)[1])
    assert torch.equal(chunk.layer(0, 256, 300)[1], example_chunk(n_tokens=300).layer(0, 256, 300)[1])
    for rows in ((0, 129), (200, 201), (0, 300)):
        with pytest.raises(CorruptEntry, match=r"checksum of block value\.0 differs"):
            chunk.layer(0, *rows)


@given(position=st.integers(0, len(written(example_chunk())) - 1), change=st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_no_changed_byte_goes_unnoticed_unless_it_is_padding(position: int, change: int) -> None:
    data = bytearray(written(example_chunk()))
    data[position] ^= change
    try:
        _, found = opened(bytes(data))
        found.read()
    except CorruptEntry:
        return
    assert_same(found, example_chunk())


@given(length=st.integers(0, len(written(example_chunk())) - 1))
@settings(max_examples=50, deadline=None)
def test_a_truncated_entry_is_refused(length: int) -> None:
    with pytest.raises(CorruptEntry, match="truncated"):
        opened(written(example_chunk())[:length])


def test_an_entry_with_something_behind_it_is_refused() -> None:
    with pytest.raises(CorruptEntry, match="bytes of"):
        opened(written(example_chunk()) + b"\0")


# What a chunk knows of its birth.


@pytest.mark.parametrize("seal", SEALS.values(), ids=SEALS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_context_facts_and_extra_blocks_are_read_back(dtype: torch.dtype, seal: Seal | None) -> None:
    patch = example_patch(n_tokens=300, dtype=dtype)
    assert_same(opened(written(patch, seal), seal)[1], patch)
    assert opened(written(patch, seal), seal)[1].names()[:4] == ["ranking", "inter", "key.1.basis", "key.1"]


def test_a_birth_behind_nothing_is_not_a_birth_of_which_nothing_is_said() -> None:
    unsaid, nothing = example_chunk(), replace(example_chunk(), context=())
    assert (opened(written(unsaid))[1].context, opened(written(nothing))[1].context) == (None, ())
    assert "context" not in header_of(written(unsaid))


def test_rows_of_a_patch_read_their_rows_of_the_first_factor() -> None:
    source = CountingSource(written(example_patch(n_tokens=300)))
    header, chunk = open_chunk(source)
    blocks = {block.name: block for block in header.blocks}
    source.ranges.clear()
    chunk.layer(2, 130, 140)
    expected = []
    for name in ("key.2", "value.2"):
        expected += [blocks[name].range(1, 2), blocks[f"{name}.basis"].range(0, 1)]
    assert source.ranges == [(header.start + begin, header.start + end) for begin, end in expected]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context", None),
        ("context", "0" * 32),
        ("context", ["0" * 31]),
        ("context", ["0" * 33]),
        ("context", ["0" * 31 + "G"]),
        ("context", [7]),
        ("context", ["0" * 32] * 1025),
        ("facts", None),
        ("facts", []),
        ("facts", {"cci": 0.5}),
        ("facts", {"cci": ["0.5"]}),
        ("facts", {"cci": [True]}),
        ("facts", {"cci": [float("nan")]}),
        ("facts", {"cci": [10**400]}),
        ("facts", {"CCI": [0.5]}),
        ("facts", {"x" * 33: [0.5]}),
        ("facts", {"cci": [0.5] * 1025}),
        ("facts", {f"fact{number}": [0.5] for number in range(17)}),
        ("extras", None),
        ("extras", []),
        ("extras", ["other"]),
        ("extras", ["inter", "inter"]),
        ("extras", "inter"),
        ("numbers", "rank8"),
        ("numbers", "rank5"),
        ("numbers", "model"),
        ("numbers", "int8"),
    ],
)
def test_a_birth_that_cannot_be_is_refused(name: str, value: object) -> None:
    data = written(example_patch())
    changed = json.dumps({**header_of(data), name: value}).encode()
    with pytest.raises(CorruptEntry, match="header makes no sense"):
        opened(with_header(data, changed))


@pytest.mark.parametrize(
    ("block", "name", "value"),
    [
        (1, "shape", [5, 2]),
        (1, "shape", [5]),
        (1, "dtype", "int8"),
        (2, "shape", [3, 2, 8]),
        (2, "shape", [5, 2, 8]),
        (2, "dtype", "int8"),
        (3, "shape", [5, 3]),
        (3, "shape", [5, 4, 1]),
        (3, "dtype", "bfloat16"),
    ],
)
def test_a_block_of_a_patch_that_cannot_be_is_refused(block: int, name: str, value: object) -> None:
    data = written(example_patch())
    about = header_of(data)
    about["blocks"][block][name] = value
    with pytest.raises(CorruptEntry, match=r"header makes no sense|bytes of"):
        opened(with_header(data, json.dumps(about).encode()))


@pytest.mark.parametrize(
    "birth",
    [{"context": ("me",)}, {"facts": {"cci": (float("inf"),)}}, {"facts": {"": (0.5,)}}, {"extras": ("other",)}],
    ids=str,
)
def test_a_chunk_that_could_not_be_read_back_is_not_made(birth: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        replace(example_chunk(), **birth)


# Headers: sizes are checked before anything is allocated by them, and everything in them can be as it is.


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


def test_a_header_put_in_anew_is_read() -> None:
    data = written(example_chunk())
    assert_same(opened(with_header(data, json.dumps(header_of(data)).encode()))[1], example_chunk())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", 0),
        ("tokens", -5),
        ("tokens", True),
        ("tokens", "5"),
        ("tokens", 6),
        ("tokens", 1 << 40),
        ("layers", 2),
        ("layers", 1 << 60),
        ("numbers", "int4"),
        ("numbers", "int8"),
        ("dtype", "float64"),
        ("dtype", ["float32"]),
        ("probe_layers", [3]),
        ("probe_layers", [-1]),
        ("probe_layers", [0]),
        ("probe_layers", None),
        ("expires", "soon"),
        ("expires", True),
        ("expires", float("nan")),
        ("expires", float("inf")),
        ("expires", 10**400),
        ("blocks", []),
        ("blocks", {}),
        ("blocks", None),
        ("key", None),
        ("key", {}),
        ("key", {"fingerprint": {}, "base": "", "prefix": "", "ids": "", "namespace": ""}),
    ],
)
def test_a_header_that_cannot_be_is_refused(name: str, value: object) -> None:
    data = written(example_chunk())
    changed = json.dumps({**header_of(data), name: value}).encode()
    with pytest.raises(CorruptEntry, match="header makes no sense"):
        opened(with_header(data, changed))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "key.9"),
        ("dtype", "float64"),
        ("shape", [5, 2]),
        ("shape", [5, 2, 0]),
        ("shape", [5, 2, -8]),
        ("shape", [5, 2, 8.0]),
        ("shape", [6, 2, 8]),
        ("shape", [5, 2, 1 << 31]),
        ("shape", "528"),
        ("offset", 1),
        ("offset", 8192),
        ("offset", -4096),
        ("xxh3", []),
        ("xxh3", ["0", "0"]),
        ("xxh3", None),
    ],
)
def test_a_block_that_cannot_be_is_refused(name: str, value: object) -> None:
    data = written(example_chunk())
    about = header_of(data)
    about["blocks"][1][name] = value
    with pytest.raises(CorruptEntry, match="header makes no sense"):
        opened(with_header(data, json.dumps(about).encode()))


@pytest.mark.parametrize("part", ["base", "prefix", "ids", "namespace"])
def test_a_key_whose_parts_are_not_text_is_refused(part: str) -> None:
    data = written(example_chunk())
    about = header_of(data)
    about["key"][part] = 7
    with pytest.raises(CorruptEntry, match="a part is not text"):
        opened(with_header(data, json.dumps(about).encode()))


@pytest.mark.parametrize("header", [b"", b"no JSON", b"[]", b"7", b"\xff\xfe", b"[" * 100_000], ids=len)
def test_what_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(CorruptEntry, match="header makes no sense"):
        opened(with_header(written(example_chunk()), header))


def test_sizes_that_only_a_header_claims_are_not_allocated() -> None:
    data = written(example_chunk())
    about = header_of(data)
    last = about["blocks"][-1]
    last["shape"] = [5, (1 << 31) - 1, (1 << 31) - 1]
    with pytest.raises(CorruptEntry, match=r"truncated: 28,832 bytes of [\d,]{20,}"):
        opened(with_header(data, json.dumps(about).encode()))


@pytest.mark.parametrize(("at", "what"), [(12, "flags"), (19, "length")])
def test_a_preamble_that_cannot_be_is_refused_unread(at: int, what: str) -> None:
    data = bytearray(written(example_chunk()))
    data[at] = 0x7F
    source = CountingSource(bytes(data))
    with pytest.raises(CorruptEntry, match="damaged preamble"):
        open_chunk(source)
    assert source.ranges == [(0, 64)]


def test_a_chunk_whose_header_would_be_refused_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_format, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(StoreError, match="a chunk of 5 tokens is too long to be stored"):
        encode(example_key(), example_chunk())


# Encryption.


def test_a_sealed_entry_tells_nothing_of_what_it_holds() -> None:
    chunk = example_chunk(n_tokens=300)
    data = written(chunk, Seal(SECRET))
    telling = [b"weights", b"framed", b"ranking", example_key().ids.encode()]
    telling += [chunk.blocks[name].numpy().tobytes()[:16] for name in chunk.names()]
    assert [text for text in telling if text in data] == []
    assert all(text in written(chunk) for text in telling), "which can be found where it is not encrypted"


def test_nothing_is_encrypted_twice_in_the_same_way() -> None:
    one, other = (written(example_chunk(), Seal(SECRET)) for _ in range(2))
    assert one[32:64] != other[32:64]
    assert one[64:80] != other[64:80]
    assert one[-16:] != other[-16:]


def test_a_sealed_entry_is_refused_under_another_secret() -> None:
    with pytest.raises(CorruptEntry, match="written under another secret"):
        opened(written(example_chunk(), Seal(SECRET)), Seal(b"another secret of enough bytes"))


def test_a_sealed_entry_is_refused_without_a_secret() -> None:
    with pytest.raises(CorruptEntry, match="is encrypted and no secret was given"):
        opened(written(example_chunk(), Seal(SECRET)))


def test_a_plain_entry_is_refused_where_entries_are_sealed() -> None:
    with pytest.raises(CorruptEntry, match="is not encrypted, in a store that is"):
        opened(written(example_chunk()), Seal(SECRET))


def test_a_changed_header_is_refused_even_if_its_checksum_was_made_right() -> None:
    data = written(example_chunk(), Seal(SECRET))
    header = bytearray(data[64 : 64 + int.from_bytes(data[16:20], "little")])
    assert_same(opened(with_header(data, bytes(header), flags=1), Seal(SECRET))[1], example_chunk())
    header[100] ^= 1
    with pytest.raises(CorruptEntry, match="cannot be decrypted"):
        opened(with_header(data, bytes(header), flags=1), Seal(SECRET))


def test_the_header_of_another_sealed_entry_is_refused() -> None:
    data, other = (written(example_chunk(number), Seal(SECRET)) for number in range(2))
    header = other[64 : 64 + int.from_bytes(other[16:20], "little")]
    with pytest.raises(CorruptEntry, match="cannot be decrypted"):
        opened(with_header(data, header, flags=1), Seal(SECRET))


def test_two_sealed_pieces_that_changed_places_are_refused() -> None:
    data = bytearray(written(example_chunk(n_tokens=300), Seal(SECRET)))
    header, _ = opened(bytes(data), Seal(SECRET))
    [block] = [block for block in header.blocks if block.name == "key.0"]
    one, other = (slice(*(header.start + at for at in block.range(i, i + 1))) for i in range(2))
    data[one], data[other] = data[other], data[one]
    _, chunk = opened(bytes(data), Seal(SECRET))
    with pytest.raises(CorruptEntry, match=r"checksum of block key\.0 differs"):
        chunk.layer(0)


def test_the_cipher_itself_refuses_a_part_in_the_place_of_another() -> None:
    _, seal = Seal(SECRET).new_entry()
    stored = seal.close(1, b"first")
    assert seal.open(1, stored) == b"first"
    with pytest.raises(CorruptEntry, match="cannot be decrypted"):
        seal.open(2, stored)
    with pytest.raises(CorruptEntry, match="cannot be decrypted"):
        Seal(SECRET).entry(bytes(32)).open(1, stored)


def test_a_short_secret_is_refused_and_a_long_one_not_shown() -> None:
    with pytest.raises(StoreError, match="the secret has 15 bytes; give at least 16 random ones"):
        Seal(b"fifteen letters")
    assert "sixteen" not in repr(Seal(b"sixteen letters."))


# The bytes themselves, as docs/store-format.md describes them.


def fixed_chunk() -> ChunkKV:
    """Return a chunk that no random number generator had a part in."""
    keys = [torch.arange(2 * 130 * 4, dtype=torch.float32).reshape(2, 130, 4) + layer for layer in range(2)]
    values = [-key[..., :3] for key in keys]
    ranking = torch.arange(130).flip(0).expand(2, 130)
    return ChunkKV.of(
        [key.to(torch.bfloat16) for key in keys], [v.to(torch.bfloat16) for v in values], ranking, probe_layers=(1,)
    )


def test_the_preamble_is_laid_out_as_documented() -> None:
    data = written(example_chunk())
    length = int.from_bytes(data[16:20], "little")
    assert data[0:8] == b"QCFUSEKV"
    assert data[8:12] == b"\x02\x00\x00\x00", "version"
    assert data[12:16] == b"\x00\x00\x00\x00", "flags"
    assert data[20:24] == b"\x00\x00\x00\x00", "nothing"
    hashed = data[0:16] + data[32:64] + data[16:20] + data[64 : 64 + length]
    assert data[24:32] == xxhash.xxh3_64_intdigest(hashed).to_bytes(8, "little"), "checksum"
    assert data[32:64] == bytes(32), "salt"
    assert (data[64:65], data[63 + length : 64 + length]) == (b"{", b"}")
    assert set(data[64 + length : -(-(64 + length) // 4096) * 4096]) == {0}, "padding"


def test_the_preamble_of_a_sealed_entry_has_a_flag_and_a_salt() -> None:
    data = written(example_chunk(), Seal(SECRET))
    assert data[8:16] == b"\x02\x00\x00\x00\x01\x00\x00\x00"
    assert data[32:64] != bytes(32)


def test_the_header_has_these_fields_and_no_others() -> None:
    about = header_of(written(fixed_chunk()))
    assert list(about) == ["key", "tokens", "layers", "dtype", "numbers", "probe_layers", "expires", "blocks"]
    assert [about[name] for name in list(about)[1:-1]] == [130, 2, "bfloat16", "model", [1], None]
    assert list(about["key"]) == ["fingerprint", "base", "prefix", "ids", "namespace"]
    assert list(about["key"]["fingerprint"]) == ["weights", "config", "tokenizer", "rope", "dtype"]
    first, second = about["blocks"][:2]
    assert {**first, "xxh3": None} == {
        "name": "ranking",
        "dtype": "int32",
        "shape": [2, 130],
        "offset": 0,
        "xxh3": None,
    }
    assert {**second, "xxh3": None} == {
        "name": "key.1",
        "dtype": "bfloat16",
        "shape": [130, 2, 4],
        "offset": 4096,
        "xxh3": None,
    }
    assert [len(second["xxh3"]), len(second["xxh3"][0])] == [2, 16]


NUMPY = {"int32": "<i4", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int8": "i1", "float8_e4m3fn": "u1"}


def read_by_hand(data: bytes, secret: bytes | None = None) -> dict[str, np.ndarray]:
    """Read an entry as a stranger would who has docs/store-format.md and nothing of this library."""
    magic, version, flags, length, checksum, salt = struct.unpack("<8sIII4xQ32s", data[:64])
    assert (magic, version, flags) == (b"QCFUSEKV", 2, int(secret is not None))
    header, context = data[64 : 64 + length], struct.pack("<8sII", magic, version, flags) + salt
    assert xxhash.xxh3_64_intdigest(context + struct.pack("<I", length) + header) == checksum
    decrypt = decryption(secret, salt) if secret is not None else lambda number, stored, context: stored
    start = (64 + length + 4095) // 4096 * 4096
    number, blocks = 0, {}
    for block in json.loads(decrypt(number, header, context))["blocks"]:
        at, left, raw = start + block["offset"], block["shape"][0], b""
        row = np.dtype(NUMPY[block["dtype"]]).itemsize * int(np.prod(block["shape"][1:]))
        for expected in block["xxh3"]:
            number += 1
            size = min(128, left) * row + (16 if secret is not None else 0)
            assert xxhash.xxh3_64_hexdigest(data[at : at + size]) == expected
            raw += decrypt(number, data[at : at + size], b"")
            at, left = at + size, left - 128
        blocks[block["name"]] = np.frombuffer(raw, NUMPY[block["dtype"]]).reshape(block["shape"])
    return blocks


def decryption(secret: bytes, salt: bytes) -> Callable[[int, bytes, bytes], bytes]:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"qcfuse-rag entry").derive(secret)
    return lambda number, stored, context: AESGCM(key).decrypt(number.to_bytes(12, "big"), stored, context)


@pytest.mark.parametrize("secret", [None, SECRET], ids=SEALS)
@pytest.mark.parametrize("numbers", [*NUMBERS, "rank16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stranger_can_read_an_entry(dtype: torch.dtype, numbers: str, secret: bytes | None) -> None:
    chunk = compress(example_chunk(n_tokens=300, dtype=dtype), numbers)
    blocks = read_by_hand(written(chunk, None if secret is None else Seal(secret)), secret)
    assert list(blocks) == chunk.names()
    for name in chunk.names():
        assert blocks[name].shape == tuple(chunk.blocks[name].shape)
        assert blocks[name].tobytes() == chunk.blocks[name].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ("model", "a86bc2744981f9ac8e1888705f14ee2a"),
        ("int8", "f4050c0a2acabceaf0f6b301c69b99f1"),
        ("fp8", "5224920f0a92769d5f374a3a9fd77656"),
    ],
)
def test_an_entry_is_the_same_bytes_as_ever(numbers: str, expected: str) -> None:
    """If this fails, stores written before cannot be read: raise the version of the format."""
    data = written(compress(fixed_chunk(), numbers))
    assert hashlib.blake2b(data, digest_size=16).hexdigest() == expected


def test_an_entry_that_knows_its_birth_is_the_same_bytes_as_ever() -> None:
    """Its fields stand between the expiry and the blocks."""
    plain = fixed_chunk()
    keys, values = ([plain.layer(layer)[kind] for layer in range(2)] for kind in range(2))
    born = ChunkKV.of(
        keys,
        values,
        plain.blocks["ranking"],
        probe_layers=(1,),
        context=(example_key(7).ids, example_key(8).ids),
        facts={"cci": (0.625,), "inter": (1.5, 0.25)},
        extras={"inter": torch.arange(130) / 128},
    )
    data = written(born)
    about = header_of(data)
    assert list(about)[6:] == ["expires", "context", "facts", "extras", "blocks"]
    assert [block["name"] for block in about["blocks"]][:3] == ["ranking", "inter", "key.1"]
    assert hashlib.blake2b(data, digest_size=16).hexdigest() == "3c211c86ca8c363a063c3928f732d404"


def test_an_address_is_the_same_as_ever() -> None:
    """If this fails, nothing that was stored before is found any more."""
    assert example_key().address == "f0fe82557d26fc0ebe0b686094e1a84e"
    assert replace(example_key(), namespace="token").address == "b7ec0488fd6ac0b8-6afd6f36c1ac5ffc4da9c800790e8790"
