"""What a method notes in an entry, its additional blocks, and low rank are stored and checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qcfuse_rag.store.entry.codec import open_chunk
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.testing import DTYPES, assert_same, example_chunk, example_patch
from tests.store.entry.entries import CIPHERS, CountingSource, header_of, opened, written


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
    "noted",
    [{"notes": {"tokens": 5}}, {"notes": {"facts": {float("inf")}}}, {"notes": {"": 1}}, {"extras": ("key.0",)}],
    ids=str,
)
def test_a_chunk_that_could_not_be_read_back_is_not_made(noted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="invalid"):
        replace(example_chunk(), **noted)
