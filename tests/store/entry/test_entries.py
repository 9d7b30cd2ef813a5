"""Entries are read back as written, whole or in parts, and any change to them is detected."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcfuse_rag.errors import CorruptEntry
from qcfuse_rag.store.chunk import ChunkKV, to_format
from qcfuse_rag.store.entry.codec import open_chunk
from qcfuse_rag.store.entry.encryption import StoreCipher
from qcfuse_rag.store.quantization import FORMATS, STORE_FORMATS
from qcfuse_rag.store.testing import DTYPES, assert_same, example_chunk
from tests.store.entry.entries import CIPHERS, SECRET, CountingSource, header_of, opened, place_of, with_header, written


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape_is_read_back_whole_and_in_ranges(data: st.DataObject) -> None:
    n_tokens, layers, heads = (data.draw(st.integers(1, most)) for most in (300, 3, 3))
    key_dim, value_dim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    dtype, cipher = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(list(CIPHERS.values())))
    keys = [torch.randn(heads, n_tokens, key_dim).to(dtype) for _ in range(layers)]
    values = [torch.randn(heads, n_tokens, value_dim).to(dtype) for _ in range(layers)]
    ranking = torch.stack([torch.randperm(n_tokens) for _ in range(layers)])
    chunk = to_format(ChunkKV.of(keys, values, ranking), data.draw(st.sampled_from(FORMATS)))
    found = opened(written(chunk, cipher), cipher)
    start = data.draw(st.integers(0, n_tokens))
    stop = data.draw(st.integers(start, n_tokens))
    for part, whole in zip(found.layer(layers - 1, start, stop), chunk.layer(layers - 1), strict=True):
        near = 0.0 if chunk.kv_dtype in STORE_FORMATS else 1e-4 + 4 * torch.finfo(dtype).eps  # rounded by shape
        assert torch.allclose(part.float(), whole[:, start:stop].float(), atol=near, rtol=near)
    assert_same(found, chunk)


@pytest.mark.parametrize("kv_dtype", ["model", "int8", "rank4"])
def test_an_entry_with_another_order_of_layers_is_read(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions wrote that put the layers first that a probe reads."""
    chunk = to_format(example_chunk(), kv_dtype)
    ranking, *names = chunk.names()
    reordered = [name for layer in (2, 0, 1) for name in names if name.split(".")[1] == str(layer)]
    with monkeypatch.context() as patch:
        patch.setattr(ChunkKV, "names", lambda chunk: [ranking, *reordered])
        data = written(chunk)
    about = {**header_of(data), "probe_layers": [2]}
    assert about["blocks"][1]["name"].split(".")[1] == "2"
    assert_same(opened(with_header(data, json.dumps(about).encode())), chunk)


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [((0, 128), (0, 1)), ((130, 140), (1, 2)), ((127, 129), (0, 2)), ((128, 256), (1, 2)), ((299, 300), (2, 3))],
)
@pytest.mark.parametrize(("cipher", "tag"), [(None, 0), (StoreCipher(SECRET), 16)], ids=CIPHERS)
def test_a_range_of_rows_reads_its_pieces_and_no_others(
    cipher: StoreCipher | None, tag: int, rows: tuple[int, int], pieces: tuple[int, int]
) -> None:
    source = CountingSource(written(example_chunk(n_tokens=300), cipher))
    _, chunk = open_chunk(source, cipher)
    block, start = place_of(chunk, "key.2")
    source.ranges.clear()
    assert torch.equal(chunk.blocks.rows("key.2", *rows), example_chunk(n_tokens=300).blocks["key.2"][slice(*rows)])
    piece = 128 * (2 * 8 * 4) + tag
    last = 300 * (2 * 8 * 4) + 3 * tag
    begin = start + block.offset
    assert source.ranges == [(begin + pieces[0] * piece, begin + min(pieces[1] * piece, last))]


def test_no_rows_read_nothing() -> None:
    source = CountingSource(written(example_chunk()))
    _, chunk = open_chunk(source)
    source.ranges.clear()
    assert chunk.blocks.rows("key.0", 0, 0).shape == (0, 2, 8)
    assert source.ranges == []


@pytest.mark.parametrize("cipher", CIPHERS.values(), ids=CIPHERS)
def test_a_damaged_piece_spoils_its_own_rows_and_no_others(cipher: StoreCipher | None) -> None:
    data = bytearray(written(example_chunk(n_tokens=300), cipher))
    block, start = place_of(opened(bytes(data), cipher), "value.0")
    data[start + block.range(1, 2)[0]] ^= 1
    chunk = opened(bytes(data), cipher)
    assert torch.equal(chunk.layer(0, 0, 128)[1], example_chunk(n_tokens=300).layer(0, 0, 128)[1])
    assert torch.equal(chunk.layer(0, 256, 300)[1], example_chunk(n_tokens=300).layer(0, 256, 300)[1])
    for rows in ((0, 129), (200, 201), (0, 300)):
        with pytest.raises(CorruptEntry, match=r"checksum of block value\.0 differs"):
            chunk.layer(0, *rows)


@given(cipher=st.sampled_from(list(CIPHERS.values())), share=st.floats(0, 1), change=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_no_changed_byte_goes_unnoticed_unless_it_is_padding(
    cipher: StoreCipher | None, share: float, change: int
) -> None:
    data = bytearray(written(example_chunk(), cipher))
    data[round(share * (len(data) - 1))] ^= change
    try:
        found = opened(bytes(data), cipher)
        found.read()
    except CorruptEntry:
        return
    assert_same(found, example_chunk())


@given(length=st.integers(0, len(written(example_chunk())) - 1))
@settings(max_examples=50, deadline=None)
def test_a_truncated_entry_is_refused(length: int) -> None:
    with pytest.raises(CorruptEntry, match="truncated"):
        opened(written(example_chunk())[:length])
