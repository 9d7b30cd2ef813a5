"""Headers: sizes are checked before memory is allocated for them, and every field is checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.entry import codec as entry_format
from qcfuse_rag.store.entry.codec import encode, open_chunk
from qcfuse_rag.store.testing import example_chunk, example_key, example_patch
from tests.store.entry.entries import CountingSource, header_of, opened, place_of, with_header, written

HEADERS = [
    *(("tokens", value) for value in (0, True, 1 << 40)),
    ("layers", 1 << 60),
    ("numbers", "int4"),
    ("numbers", ["int8"]),
    ("dtype", "float64"),
    *(("expires", value) for value in ("soon", float("nan"))),
    ("blocks", []),
    ("key", None),
    ("key", {"fingerprint": {}, "base": "", "prefix": "", "ids": "", "namespace": ""}),
]
PATCH_HEADERS = [
    ("Context", []),
    ("x" * 33, []),
    *(("extras", value) for value in (None, [], ["other"], ["inter", "inter"], "inter", ["ranking"])),
    *(("numbers", value) for value in ("rank8", "rank5", "model", "int8")),
]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [*((example_chunk, *case) for case in HEADERS), *((example_patch, *case) for case in PATCH_HEADERS)],
)
def test_a_header_that_cannot_be_is_refused(make: Callable[[], ChunkKV], name: str, value: object) -> None:
    data = written(make())
    changed = json.dumps({**header_of(data), name: value}).encode()
    with pytest.raises(CorruptEntry, match="header makes no sense"):
        opened(with_header(data, changed))


BLOCKS = [
    ("name", "key.9"),
    ("dtype", "float64"),
    *(("shape", shape) for shape in ([5, 2, 0], [5, 2, -8], [6, 2, 8])),
    ("offset", 8192),
    *(("xxh3", checksums) for checksums in ([], ["0", "0"])),
]
PATCH_BLOCKS = [
    *((1, "shape", shape) for shape in ([5, 2], [5])),
    *((2, "shape", shape) for shape in ([3, 2, 8], [5, 2, 8])),
    *((3, "shape", shape) for shape in ([5, 3], [5, 4, 1])),
    *((block, "dtype", dtype) for block, dtype in ((1, "int8"), (2, "int8"), (3, "bfloat16"))),
]


@pytest.mark.parametrize(
    ("make", "block", "name", "value"),
    [*((example_chunk, 1, *case) for case in BLOCKS), *((example_patch, *case) for case in PATCH_BLOCKS)],
)
def test_a_block_that_cannot_be_is_refused(make: Callable[[], ChunkKV], block: int, name: str, value: object) -> None:
    data = written(make())
    about = header_of(data)
    about["blocks"][block][name] = value
    with pytest.raises(CorruptEntry, match=r"header makes no sense|bytes of"):
        opened(with_header(data, json.dumps(about).encode()))


@pytest.mark.parametrize("part", ["base", "prefix", "ids", "namespace"])
def test_a_key_whose_parts_are_not_text_is_refused(part: str) -> None:
    data = written(example_chunk())
    about = header_of(data)
    about["key"][part] = 7
    with pytest.raises(CorruptEntry, match="a part is not text"):
        opened(with_header(data, json.dumps(about).encode()))


@pytest.mark.parametrize("header", [b"", b"no JSON", b"[]", b"[" * 100_000], ids=len)
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


def test_notes_are_fields_of_the_header_of_which_a_chunk_without_notes_has_none() -> None:
    noted = {**example_patch().notes, "of_another_method": [1, "two", None]}
    assert opened(written(replace(example_chunk(), notes=noted))).notes == noted
    assert not {"context", "facts", "extras"} & set(header_of(written(example_chunk())))


def test_rows_of_a_patch_read_their_rows_of_the_first_factor() -> None:
    source = CountingSource(written(example_patch(n_tokens=300)))
    _, chunk = open_chunk(source)
    assert chunk.names()[:4] == ["ranking", "inter", "key.0.basis", "key.0"]
    source.ranges.clear()
    chunk.layer(2, 130, 140)
    expected = []
    for name, piece in (("key.2", 1), ("key.2.basis", 0), ("value.2", 1), ("value.2.basis", 0)):
        block, start = place_of(chunk, name)
        expected.append(tuple(start + offset for offset in block.range(piece, piece + 1)))
    assert source.ranges == expected


@pytest.mark.parametrize(
    "noted",
    [{"notes": {"tokens": 5}}, {"notes": {"facts": {float("inf")}}}, {"notes": {"": 1}}, {"extras": ("key.0",)}],
    ids=str,
)
def test_a_chunk_that_could_not_be_read_back_is_not_made(noted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="invalid"):
        replace(example_chunk(), **noted)
