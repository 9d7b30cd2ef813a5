"""The format of one byte: bounds on the error, for small numbers beside large ones too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from qcfuse_rag.models.rope import KVShape
from qcfuse_rag.store.chunk import ChunkKV, to_format, to_store_format
from qcfuse_rag.store.entry.codec import encode, entry_bytes
from qcfuse_rag.store.quantization import (
    LOSSLESS,
    RANKS,
    STORE_FORMATS,
    check_kv_dtype,
    check_rank,
    dequantize,
    factorize,
    multiply_factors,
    quantize,
)
from qcfuse_rag.store.testing import DTYPES, assert_same, example_chunk, example_key, example_patch

CHANNEL, TOKEN = 0, 2
"""What shares a scale: one channel's numbers over all tokens, or one token's over all channels."""

ROUNDING = 1 + 1e-5
"""Scales and products are float32 numbers themselves."""

TINY = 2.0**-100


def tensors() -> st.SearchStrategy[torch.Tensor]:
    """Tokens of any numbers: of any size, zeros, and such as are below the smallest normal one."""
    shapes = st.tuples(st.integers(1, 8), st.integers(1, 2), st.integers(1, 5))
    sizes = st.floats(-(2.0**127), 2.0**127, width=32)
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=sizes)).map(torch.from_numpy)


@given(original=tensors(), over=st.sampled_from([CHANNEL, TOKEN]))
@settings(max_examples=150, deadline=None)
def test_no_number_is_off_by_more_than_half_a_step(original: torch.Tensor, over: int) -> None:
    """None grows beyond the largest, either, and none changes its sign unless it is next to nothing."""
    quantized, scale = quantize(original, over=over)
    dequantized = dequantize(quantized, scale, torch.float32)
    assert ((dequantized - original).abs() <= scale / 2 * ROUNDING).all()
    assert (dequantized.abs() <= original.abs().amax(over, keepdim=True) * ROUNDING + TINY).all()
    assert (dequantized * original.sign() >= -TINY).all()


@pytest.mark.parametrize("over", [CHANNEL, TOKEN])
def test_zeros_stay_zeros_beside_other_numbers_and_alone(over: int) -> None:
    original = torch.randn(6, 2, 4)
    original[:, 1, 2] = 0.0
    original[3] = 0.0
    quantized, scale = quantize(original, over=over)
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    assert (dequantize(quantized, scale, torch.float32)[original == 0.0] == 0.0).all()
    nothing = torch.zeros(6, 2, 4)
    assert torch.equal(dequantize(*quantize(nothing, over=over), torch.float32), nothing)


def test_keys_have_a_scale_a_channel_and_values_one_a_token() -> None:
    chunk = to_format(example_chunk(), "int8")
    assert chunk.blocks["key.0"].shape == (5, 2, 8)
    assert chunk.blocks["key.0.scale"].shape == (1, 2, 8)
    assert chunk.blocks["value.0"].shape == (5, 2, 4)
    assert chunk.blocks["value.0.scale"].shape == (5, 2, 1)
    kinds = {chunk.blocks[name].dtype for name in chunk.names() if not name.endswith("scale") and name != "ranking"}
    assert kinds == {torch.int8}


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.52), (torch.float32, 0.26)], ids=str)
def test_a_passage_takes_a_byte_a_number_and_little_more(dtype: torch.dtype, share: float) -> None:
    keys, values = ([torch.randn(4, 256, 128).to(dtype) for _ in range(2)] for _ in range(2))
    chunk = ChunkKV.of(keys, values, torch.arange(256).expand(2, 256))
    assert 0.49 * share < to_format(chunk, "int8").nbytes / chunk.nbytes < share


def test_the_way_back_gives_the_models_dtype_without_what_was_lost() -> None:
    chunk = to_format(example_chunk(dtype=torch.float16), "int8")
    back = to_format(chunk, LOSSLESS)
    assert (back.kv_dtype, back.blocks["key.0"].dtype) == (LOSSLESS, torch.float16)
    assert all(torch.equal(first, other) for first, other in zip(back.layer(1), chunk.layer(1), strict=True))


# Low rank: products of two thin factors, for differences.


@pytest.mark.parametrize("shape", [(60, 2, 20), (30, 3, 40), (3, 2, 8)], ids=str)
@pytest.mark.parametrize("kv_dtype", RANKS)
def test_nothing_of_its_rank_is_nearer(shape: tuple[int, int, int], kv_dtype: str) -> None:
    """Eckart and Young: what is left is what the singular values left out say, which numpy computes by itself."""
    original = torch.randn(shape)
    left, right = factorize(original, kv_dtype)
    rank = min(RANKS[kv_dtype], shape[0], shape[1] * shape[2])
    assert (left.shape, right.shape) == ((shape[0], rank), (rank, *shape[1:]))
    off = multiply_factors(left, right, torch.float32) - original
    singular = np.linalg.svd(original.reshape(shape[0], -1).numpy().astype(np.float64), compute_uv=False)
    left_out = float(np.sqrt((singular[rank:] ** 2).sum()))
    assert float(off.norm()) == pytest.approx(left_out, rel=1e-4, abs=1e-3)
    assert multiply_factors(*factorize(torch.zeros(shape), kv_dtype), torch.float32).abs().max() == 0.0


def test_the_same_difference_is_the_same_bytes() -> None:
    original = torch.randn(40, 2, 8)
    for first, other in zip(factorize(original, "rank8"), factorize(original, "rank8"), strict=True):
        assert torch.equal(first, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_of_low_rank_come_back_in_the_models_dtype_and_in_ranges(dtype: torch.dtype) -> None:
    patch = to_format(example_chunk(n_tokens=300, dtype=dtype), "rank16")
    exact = example_chunk(n_tokens=300, dtype=dtype)
    for layer in range(3):
        for found, expected in zip(patch.layer(layer), exact.layer(layer), strict=True):
            assert (found.dtype, found.shape) == (dtype, expected.shape)
            assert torch.allclose(found.float(), expected.float(), atol=30 * torch.finfo(dtype).eps), (
                "16 is all there is"
            )
        for part, whole in zip(patch.layer(layer, 127, 140), patch.layer(layer), strict=True):
            assert torch.allclose(part.float(), whole[:, 127:140].float(), atol=4 * torch.finfo(dtype).eps)


def test_a_store_converts_lossless_chunks_only_and_none_to_low_rank() -> None:
    with pytest.raises(ValueError, match=r"no kv_dtype 'rank32'; there are model, int8$"):
        check_kv_dtype("rank32")
    for kv_dtype in STORE_FORMATS:
        for written in (to_format(example_chunk(), "int8"), example_patch()):
            assert to_store_format(written, kv_dtype) is written
        assert_same(to_store_format(example_chunk(), kv_dtype), to_format(example_chunk(), kv_dtype))
    assert check_rank(32) == "rank32"
    with pytest.raises(ValueError, match="no format of rank 5; there are 4, 8, 16, 32, 64"):
        check_rank(5)


def test_a_format_does_not_change_the_provenance() -> None:
    patch = example_patch(n_tokens=40)
    for kv_dtype in STORE_FORMATS:
        other = to_format(patch, kv_dtype)
        assert (other.notes, other.extras) == (patch.notes, ("inter",))
        assert torch.equal(other.blocks["inter"], patch.blocks["inter"])


@pytest.mark.parametrize("kv_dtype", [*STORE_FORMATS, *RANKS])
@pytest.mark.parametrize("n_tokens", [20, 300])
def test_how_many_bytes_an_entry_takes_is_known_before(kv_dtype: str, n_tokens: int) -> None:
    shape = KVShape(2, 40, 24)
    keys, values = ([torch.randn(2, n_tokens, dim) for _ in range(3)] for dim in (40, 24))
    chunk = to_format(ChunkKV.of(keys, values, torch.arange(n_tokens).expand(3, n_tokens)), kv_dtype)
    actual = len(b"".join(encode(example_key(), chunk)))
    assert abs(entry_bytes([shape] * 3, torch.float32, kv_dtype, n_tokens) - actual) <= 8192
