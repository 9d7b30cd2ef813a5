"""Rotations: composable, invertible, measured rather than assumed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.cohere2.modeling_cohere2 import apply_rotary_pos_emb as interleaved_rotation
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half_split_rotation

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.models.rope import angles, measure_rope, rotate, rotate_into
from tests.support.families import build_model

FREQUENCIES = 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16)


def random_keys(tokens: int = 6, channels: int = 16) -> torch.Tensor:
    return torch.randn(2, tokens, channels, generator=torch.Generator().manual_seed(tokens))


@given(first=st.integers(-500, 500), second=st.integers(-500, 500), interleaved=st.booleans())
def test_two_rotations_are_one_by_their_sum(first: int, second: int, interleaved: bool) -> None:
    keys, positions = random_keys(), torch.arange(6)
    by_first, by_second, by_both = (angles(FREQUENCIES, positions + shift) for shift in (first, second, first + second))
    base = angles(FREQUENCIES, -positions)
    twice = rotate(
        rotate(rotate(keys, *by_first, interleaved=interleaved), *by_second, interleaved=interleaved),
        *base,
        interleaved=interleaved,
    )
    assert torch.allclose(twice, rotate(keys, *by_both, interleaved=interleaved), atol=2e-4)


@given(position=st.integers(0, 4000))
def test_rotating_back_gives_the_stored_key(position: int) -> None:
    keys, positions = random_keys(), torch.arange(6) + position
    there = rotate(keys, *angles(FREQUENCIES, positions), interleaved=False)
    assert torch.allclose(rotate(there, *angles(FREQUENCIES, -positions), interleaved=False), keys, atol=1e-5)


def test_both_pairings_are_those_of_transformers() -> None:
    keys, positions = random_keys()[None], torch.arange(6) + 100
    cos, sin = angles(FREQUENCIES, positions)
    double = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    _, expected = half_split_rotation(keys, keys, *double)
    assert torch.allclose(rotate(keys, cos, sin, interleaved=False), expected, atol=1e-6)
    pairs = cos.repeat_interleave(2, -1)[None], sin.repeat_interleave(2, -1)[None]
    _, expected = interleaved_rotation(keys, keys, *pairs)
    assert torch.allclose(rotate(keys, cos, sin, interleaved=True), expected, atol=1e-6)


def test_channels_beyond_the_rotary_part_stay() -> None:
    keys = random_keys(channels=24)
    moved = rotate(keys, *angles(FREQUENCIES, torch.arange(6) + 9), interleaved=False)
    assert torch.equal(moved[..., 16:], keys[..., 16:])
    assert not torch.allclose(moved[..., :16], keys[..., :16])


def test_half_precision_is_rotated_in_float32_and_rounded_once() -> None:
    keys = random_keys().to(torch.bfloat16)
    cos, sin = angles(FREQUENCIES, torch.arange(6) + 700)
    assert torch.equal(
        rotate(keys, cos, sin, interleaved=False), rotate(keys.float(), cos, sin, interleaved=False).to(torch.bfloat16)
    )


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", ["half-split, 16 channels"] * 4),
        ("cohere2-interleaved", ["interleaved, 16 channels", "no position"] * 2),
        ("phi3-partial-rotary", ["half-split, 8 channels"] * 4),
        ("smollm3-nope", ["half-split, 16 channels", "no position"] * 2),
        ("deepseek2-latent", ["interleaved, 8 channels"] * 4),
        ("deepseek3-latent", ["half-split, 8 channels"] * 4),
        ("llama4-chunked", ["interleaved, 16 channels", "no position"] * 2),
    ],
)
def test_each_layers_rotation_is_found(family: str, expected: list[str]) -> None:
    ropes, _ = measure_rope(build_model(family), max_position=511, n_layers=4)
    assert [rope.describe() for rope in ropes] == expected


def test_layers_with_different_frequencies_are_told_apart() -> None:
    ropes, _ = measure_rope(build_model("gemma3-two-ropes"), max_position=511, n_layers=4)
    sliding, full = ropes[0].inv_freq, ropes[1].inv_freq
    assert sliding is not None
    assert full is not None
    assert not torch.allclose(sliding, full)
    assert torch.equal(sliding, ropes[2].inv_freq)


def test_a_rotation_nobody_knows_is_refused() -> None:
    model = build_model("llama")
    rotary = model.model.rotary_emb
    # Positions that are squared are no rotation linear in the position.
    rotary.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "position_ids": kwargs["position_ids"] ** 2}), with_kwargs=True
    )
    with pytest.raises(UnsupportedModel, match="layer 0 does not move its keys by a rotation this library knows"):
        measure_rope(model, max_position=511, n_layers=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [16, 10])
def test_keys_are_rotated_on_their_way_as_they_are_in_place(
    channels: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """Into views of any strides, for several sequences at once, and nothing beside them is written."""
    cos, sin = angles(1.0 / torch.arange(1, channels // 2 + 1), torch.arange(5, 12))
    keys = torch.randn(7, 3, 16).to(dtype).transpose(0, 1)
    out = torch.full((2, 3, 20, 16), float("nan"), dtype=dtype)
    rotate_into(out[:, :, 4:11], keys, cos, sin, interleaved=interleaved)
    expected = rotate(keys, cos, sin, interleaved=interleaved)
    assert torch.allclose(out[:, :, 4:11], expected.expand(2, -1, -1, -1), atol=1e-6)
    assert int(out.isnan().sum()) == 2 * 3 * 13 * 16
