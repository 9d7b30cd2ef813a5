"""A reader bias is added to the scores of reading rows on biased keys, in every path of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qcfuse_rag.runtime.attention.dispatch import rows_attention
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.rows import ReaderBias, RowsPlan
from qcfuse_rag.runtime.step_plan import StepPlan
from tests.runtime.test_attention import Layer

HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 16, 90
FIRST_ROW, START, STOP = 70, 20, 64
ROWS = torch.tensor([3, 19, 20, 41, 63, 66, *range(70, 90)])
SCALING = DIM**-0.5


def layer_at(index: int) -> Layer:
    layer = Layer()
    layer.layer_idx = index
    return layer


def tensors(seed: int, rows: int = len(ROWS)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, rows), (KV_HEADS, LENGTH), (KV_HEADS, LENGTH))
    query, key, value = (torch.randn(1, *size, DIM, generator=generator) for size in sizes)
    return query, key, value


def bias_of(seed: int, start: int = START, stop: int = STOP) -> ReaderBias:
    return ReaderBias(torch.randn(4, HEADS, generator=torch.Generator().manual_seed(seed)), FIRST_ROW, start, stop)


def expected(
    tensors: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    bias: Tensor,
    keys: tuple[int, int] = (START, STOP),
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute one softmax over all keys, with the bias written out."""
    query, key, value = (tensor[0].double() for tensor in tensors)
    groups = HEADS // KV_HEADS
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * SCALING
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    positions = torch.arange(LENGTH)
    reads = (rows >= FIRST_ROW)[:, None] & (positions >= keys[0]) & (positions < keys[1])
    scores = scores + reads * bias[:, None, None].double()
    distance = rows[:, None] - positions
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(rows), 1)], -1)
        return (scores.softmax(-1)[..., :-1] @ value).transpose(0, 1)
    return (scores.softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 30}, {"softcap": 2.0}, {"s_aux": torch.linspace(-2, 2, HEADS)}],
    ids=["blocks", "window", "softcap", "sinks"],
)
def test_the_bias_is_added_to_the_scores_of_reading_rows(options: dict[str, object], layer: int) -> None:
    data, bias = tensors(0), bias_of(1)
    plan = replace(RowsPlan.of(ROWS), reader_bias=bias)
    out, _ = rows_attention(layer_at(layer), *data, None, SCALING, fusion=plan, **options)  # type: ignore[arg-type]
    names = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}
    reference = expected(data, ROWS, bias.by_layer[layer], **{names[name]: value for name, value in options.items()})  # type: ignore[arg-type]
    assert float((out[0] - reference).abs().max()) < 1e-5
    plain, _ = rows_attention(layer_at(layer), *data, None, SCALING, fusion=RowsPlan.of(ROWS), **options)  # type: ignore[arg-type]
    assert torch.equal(plain[:, :6], out[:, :6]) or float((plain[:, :6] - out[:, :6]).abs().max()) < 1e-6
    assert float((plain[:, 6:] - out[:, 6:]).abs().max()) > 1e-2, "the bias changes what readers get"


@given(start=st.integers(0, 69), length=st.integers(1, 70), sparse=st.integers(0, 69), readers=st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_any_range_of_keys_and_any_rows(start: int, length: int, sparse: int, readers: int) -> None:
    stop = min(start + length, FIRST_ROW)
    rows = torch.tensor([*range(0, sparse, 3), *range(LENGTH - readers, LENGTH)])
    data, bias = tensors(2, len(rows)), bias_of(3, start, stop)
    plan = replace(RowsPlan.of(rows), reader_bias=bias)
    out, _ = rows_attention(layer_at(1), *data, None, SCALING, fusion=plan)  # type: ignore[arg-type]
    assert float((out[0] - expected(data, rows, bias.by_layer[1], (start, stop))).abs().max()) < 1e-5


@pytest.mark.parametrize("window", [None, 30])
def test_decode_steps_read_with_the_bias_of_their_own_buffer(window: int | None) -> None:
    query, key, value = tensors(4, 1)
    biases = (bias_of(5), None, bias_of(6))
    buffers = [KVBuffer((key,) * 4, (value,) * 4, reader_bias=bias) for bias in biases]
    plan = StepPlan(buffers, torch.full((3, 1), LENGTH - 1), (LENGTH - 1,) * 3, (window,) * 4)
    out, _ = rows_attention(  # type: ignore[arg-type]
        layer_at(2), query.expand(3, -1, -1, -1), key, value, None, SCALING, fusion=plan, sliding_window=window
    )
    for index, bias in enumerate(biases):
        numbers = torch.zeros(HEADS) if bias is None else bias.by_layer[2]
        reference = expected((query, key, value), torch.tensor([LENGTH - 1]), numbers, window=window)
        assert float((out[index] - reference).abs().max()) < 1e-5


def test_what_is_exact_has_no_bias() -> None:
    bias = bias_of(7)
    assert bias.behind(START) is bias
    narrowed = bias.behind(40)
    assert narrowed is not None
    assert (narrowed.start, narrowed.stop, narrowed.first_row) == (40, STOP, FIRST_ROW)
    assert bias.behind(STOP) is None
