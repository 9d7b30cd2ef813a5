"""Headers: sizes are checked before memory is allocated for them, and every field is checked."""

from __future__ import annotations

import json

import pytest

from qcfuse_rag.errors import CorruptEntry, StoreError
from qcfuse_rag.store.entry import codec as entry_format
from qcfuse_rag.store.entry.codec import encode, open_chunk
from qcfuse_rag.store.testing import example_chunk, example_key
from tests.store.entry.entries import CountingSource, header_of, opened, with_header, written


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", 0),
        ("tokens", True),
        ("tokens", 1 << 40),
        ("layers", 1 << 60),
        ("numbers", "int4"),
        ("dtype", "float64"),
        ("expires", "soon"),
        ("expires", float("nan")),
        ("blocks", []),
        ("key", None),
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
        ("shape", [5, 2, 0]),
        ("shape", [5, 2, -8]),
        ("shape", [6, 2, 8]),
        ("offset", 8192),
        ("xxh3", []),
        ("xxh3", ["0", "0"]),
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
