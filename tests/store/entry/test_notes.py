"""What a method notes in an entry, its additional blocks, and low rank are stored and checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.entry.codec import open_chunk
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import DTYPES, assert_same, example_chunk, example_patch
from tests.store.entry.entries import CIPHERS, CountingSource, header_of, opened, with_header, written


@pytest.mark.parametrize("cipher", CIPHERS.values(), ids=CIPHERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_notes_and_additional_blocks_are_read_back(dtype: torch.dtype, cipher: StoreCipher | None) -> None:
    patch = example_patch(n_tokens=300, dtype=dtype)
    assert_same(opened(written(patch, cipher), cipher)[1], patch)
    assert opened(written(patch, cipher), cipher)[1].names()[:4] == ["ranking", "inter", "key.0.basis", "key.0"]


def test_notes_are_fields_of_the_header_of_which_a_chunk_without_notes_has_none() -> None:
    noted = {**example_patch().notes, "of_another_method": [1, "two", None]}
    assert opened(written(replace(example_chunk(), notes=noted)))[1].notes == noted
    assert header_of(written(example_patch()))["context"] == example_patch().notes["context"]
    assert not {"context", "facts", "extras"} & set(header_of(written(example_chunk())))


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
        ("Context", []),
        ("x" * 33, []),
        ("extras", None),
        ("extras", []),
        ("extras", ["other"]),
        ("extras", ["inter", "inter"]),
        ("extras", "inter"),
        ("extras", ["ranking"]),
        ("numbers", "rank8"),
        ("numbers", "rank5"),
        ("numbers", "model"),
        ("numbers", "int8"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(name: str, value: object) -> None:
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
    "noted",
    [{"notes": {"tokens": 5}}, {"notes": {"facts": {float("inf")}}}, {"notes": {"": 1}}, {"extras": ("key.0",)}],
    ids=str,
)
def test_a_chunk_that_could_not_be_read_back_is_not_made(noted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="invalid"):
        replace(example_chunk(), **noted)
