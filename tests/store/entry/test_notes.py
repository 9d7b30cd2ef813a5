"""What a method notes in an entry, and the factors of low rank; see `KVStoreTests` for reading them back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qcfuse_rag.store.entry.codec import open_chunk
from qcfuse_rag.store.testing import example_chunk, example_patch
from tests.store.entry.entries import CountingSource, header_of, opened, place_of, written


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
