"""Placing of stored blocks against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from qcfuse_rag.models.rope import LayerRope
from qcfuse_rag.runtime.kernels import placement as place
from qcfuse_rag.runtime.kernels.placement import PlacementBlock, place_blocks, place_blocks_reference
from qcfuse_rag.store.quantization import quantize
from tests.runtime.kernels.operands import TOLERANCE, relative_error, watched
from tests.support.recorders import DEVICE


def block(
    tokens: int, start: int, dtype: torch.dtype, kv_dtype: str, rope: LayerRope | None, into: Tensor
) -> PlacementBlock:
    """A stored block of fresh random numbers; with a rotation they are keys, else values."""
    stored = torch.randn(tokens, into.shape[1], into.shape[3]).to(DEVICE, dtype)
    if kv_dtype == "model":
        return PlacementBlock(stored, None, into, start, rope)
    return PlacementBlock(*quantize(stored, over=2 if rope is None else 0), into, start, rope)


@pytest.mark.parametrize(
    ("rope", "dtype", "kv_dtype"),
    [
        *[("all channels", dtype, kv_dtype) for dtype in TOLERANCE for kv_dtype in ("model", "int8")],
        *[(rope, torch.float16, "int8") for rope in ("interleaved", "some channels", "no position", "values")],
        ("values", torch.bfloat16, "int8"),
        ("values", torch.float32, "model"),
    ],
    ids=str,
)
def test_blocks_are_placed_as_by_the_reference(rope: str, dtype: torch.dtype, kv_dtype: str) -> None:
    """Several chunks in two layers, some adjacent; nothing else is written."""
    frequencies = 10000.0 ** -(torch.arange(0, 24 if rope == "some channels" else 80, 2) / 80)
    ropes = {"no position": LayerRope(None), "values": None}
    chosen = ropes.get(rope, LayerRope(frequencies.to(DEVICE), interleaved=rope == "interleaved"))
    layers = [torch.full((1, 3, 200, 80), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)]
    blocks = [
        block(tokens, start, dtype, kv_dtype, chosen, into)
        for into in layers
        for tokens, start in ((37, 4), (1, 41), (60, 99))
    ]
    place_blocks(blocks)
    placed = [layer.clone() for layer in layers]
    for layer in layers:
        layer.fill_(float("nan"))
    place_blocks_reference(blocks)
    for result, expected in zip(placed, layers, strict=True):
        assert torch.equal(result.isnan(), expected.isnan())
        assert relative_error(result.nan_to_num(), expected.nan_to_num()) < TOLERANCE[dtype]


def test_blocks_of_several_kinds_are_placed_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = LayerRope(10000.0 ** -(torch.arange(0, 64, 2, device=DEVICE) / 64))
    keys, values = (torch.full((1, 2, 50, 64), float("nan"), device=DEVICE) for _ in range(2))
    blocks = [
        block(10, 0, torch.float32, "int8", rope, keys),
        block(10, 10, torch.float32, "model", rope, keys),
        block(20, 5, torch.float32, "int8", None, values),
        block(10, 30, torch.float32, "model", None, values),
        block(9, 20, torch.float32, "model", LayerRope(None), keys),
    ]
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(place, "place", watched(place.place, launched))
    place_blocks(blocks)
    assert len(launched) == 3, "one launch for each storage format, with or without rotation"
    placed = keys.clone(), values.clone()
    place_blocks_reference(blocks)
    assert all(torch.allclose(a, b, atol=1e-6, equal_nan=True) for a, b in zip(placed, (keys, values), strict=True))


def test_buffers_of_different_lengths_are_placed_at_once() -> None:
    rope = LayerRope(1000.0 ** -(torch.arange(0, 64, 2, device=DEVICE) / 64))
    stored = torch.randn(10, 2, 64).to(DEVICE)
    placed, expected = ([torch.zeros(1, 2, size, 64, device=DEVICE) for size in (12, 300)] for _ in range(2))
    for into, place_all in ((placed, place_blocks), (expected, place_blocks_reference)):
        place_all([PlacementBlock(stored, None, into[0], 1, rope), PlacementBlock(stored, None, into[1], 280, rope)])
    for result, layer in zip(placed, expected, strict=True):
        assert relative_error(result, layer) < 1e-5


def test_blocks_that_do_not_fit_are_refused() -> None:
    into = torch.zeros(1, 2, 50, 64)
    stored, scale = torch.zeros(10, 2, 64), torch.zeros(1, 2, 64)
    for bad, message in (
        (lambda: PlacementBlock(stored, None, into, 41), "exceed a buffer of 50"),
        (lambda: PlacementBlock(stored, None, into, -1), "exceed a buffer of 50"),
        (lambda: PlacementBlock(torch.zeros(10, 3, 64), None, into, 0), "does not go into"),
        (lambda: PlacementBlock(stored, scale[:, :1], into, 0), "scales .* do not fit"),
        (
            lambda: PlacementBlock(stored.transpose(0, 1).contiguous().transpose(0, 1), None, into, 0),
            "must be contiguous",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
