"""Sparse-row attention: every fast path against the step-by-step one, every plan against one plain mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from qcfuse_rag.runtime.attention import dispatch as rows_module
from qcfuse_rag.runtime.attention.dispatch import LONG_KEYS, row_blocks_of, rows_attention
from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.reference_attention import explicit_attention
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan, StepPlan


class Layer(nn.Module):
    layer_idx = 0


def plain_mask(rows: Tensor, length: int, visible: Tensor | None, window: int | None) -> Tensor:
    """Return which row sees which key, pair by pair."""
    allowed = set(range(length) if visible is None else visible.tolist())
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows.tolist()):
        for key in range(length):
            mask[i, key] = key in allowed and key <= row and (window is None or row - key < window)
    return mask


@st.composite
def plans(draw: st.DrawFn) -> tuple[Tensor, int, Tensor | None, int | None]:
    length = draw(st.integers(2, 40))
    rows = sorted(draw(st.sets(st.integers(0, length - 1), min_size=1)) | {length - 1})
    visible = draw(st.none() | st.sets(st.integers(0, length - 1)))
    window = draw(st.none() | st.integers(1, length + 3))
    # Every row sees itself, as it does in a real plan.
    seen = None if visible is None else torch.tensor(sorted(visible | set(rows)))
    return torch.tensor(rows), length, seen, window


@given(plan=plans(), size=st.integers(1, 8))
@settings(deadline=None)
def test_blocks_show_every_row_exactly_what_it_may_see(
    plan: tuple[Tensor, int, Tensor | None, int | None], size: int
) -> None:
    rows, length, visible, window = plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "ROWS_PER_BLOCK", size)
        blocks = row_blocks_of(RowsPlan(rows, length, None if visible is None else [visible]), 0, window)
    positions = torch.arange(length) if visible is None else visible
    seen = torch.zeros(len(rows), length, dtype=torch.bool)
    for block in blocks:
        keys = positions[block.start_key : block.stop_key]
        shown = torch.ones(block.stop - block.start, len(keys), dtype=torch.bool)
        if block.causal:
            shown = shown.tril(len(keys) - (block.stop - block.start))
        elif block.mask is not None:
            shown = block.mask
        seen[block.start : block.stop, keys] = shown
    assert torch.equal(seen, plain_mask(rows, length, visible, window))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("rows", [range(40), [39], [3, 4, 5, 20, 39], [0, *range(10, 40, 3)], range(25, 40)], ids=str)
def test_fast_attention_equals_step_by_step(
    heads: tuple[int, int], dtype: torch.dtype, window: int | None, rows: range | list[int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    at = torch.tensor(list(rows))
    length = int(at[-1]) + 1
    query = torch.randn(1, heads[0], len(at), 16, generator=generator).to(dtype)
    key = torch.randn(1, heads[1], length, 16, generator=generator).to(dtype)
    value = torch.randn(1, heads[1], length, 24, generator=generator).to(dtype)
    plan = RowsPlan(at, length)
    out, _ = rows_attention(Layer(), query, key, value, None, 0.3, fusion=plan, sliding_window=window)
    expected = explicit_attention(query, key, value, plain_mask(at, length, None, window), AttentionParams(0.3))
    assert out.shape == (1, len(at), heads[0], 24)
    assert torch.allclose(out.transpose(1, 2).float(), expected.float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("by_products", [True, False])
@pytest.mark.parametrize("length", [LONG_KEYS - 1, LONG_KEYS, LONG_KEYS + 1])
@pytest.mark.parametrize("common", [0.0, 40.0])
def test_one_row_over_many_keys_equals_step_by_step(
    length: int, common: float, by_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that all keys have in common, as with biases of keys, cost no accuracy."""
    monkeypatch.setattr(rows_module, "products_attend_faster", lambda: by_products)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 6, 1, 16, generator=generator)
    query[..., 0] = common
    key, value = (torch.randn(1, 3, length + 5, 16, generator=generator) for _ in range(2))
    key[..., 0] = common
    query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    plan = StepPlan([KVBuffer((key,), (value,))], torch.tensor([[length - 1]]), (length - 1,), [None])
    out, _ = rows_attention(Layer(), query, key, value, None, 0.3, fusion=plan)
    read = key[:, :, :length], value[:, :, :length]
    expected = explicit_attention(query, *read, None, AttentionParams(0.3)).float()
    assert (out.transpose(1, 2).float() - expected).norm() < 0.01 * expected.norm()


def test_visible_keys_are_the_only_ones_read() -> None:
    generator = torch.Generator().manual_seed(2)
    rows, visible = torch.tensor([8, 9]), torch.tensor([1, 4, 8, 9])
    query = torch.randn(1, 2, 2, 8, generator=generator)
    key, value = (torch.randn(1, 2, 10, 8, generator=generator) for _ in range(2))
    hidden = torch.tensor([p for p in range(10) if p not in visible])
    key[:, :, hidden] = torch.nan
    value[:, :, hidden] = torch.nan
    plan = RowsPlan(rows, 10, visible=[visible])
    out, _ = rows_attention(Layer(), query, key, value, None, fusion=plan)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    expected = explicit_attention(query, key[:, :, visible], value[:, :, visible], mask, AttentionParams(8**-0.5))
    assert torch.allclose(out.transpose(1, 2), expected, atol=1e-6)


def test_softcap_and_sinks_match_the_formulas() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 1, 3, 4, generator=generator) for _ in range(3))
    sinks = torch.tensor([0.7])
    out, _ = rows_attention(
        Layer(), query, key, value, None, 1.0, fusion=RowsPlan(torch.arange(3), 3), softcap=5.0, s_aux=sinks
    )
    for row in range(3):
        scores = 5 * torch.tanh(query[0, 0, row] @ key[0, 0, : row + 1].T / 5)
        weights = scores.exp() / (scores.exp().sum() + sinks.exp())
        assert torch.allclose(out[0, row, 0], weights @ value[0, 0, : row + 1], atol=1e-5)


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("window", [None, 6])
def test_attention_weights_are_those_of_one_softmax_per_row(
    reduce: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    rows, length = torch.tensor([5, 9, 11]), 12
    known = torch.ones(length, dtype=torch.bool)
    known[[2, 7]] = False
    query = torch.randn(1, 4, 3, 8, generator=generator)
    key = torch.randn(1, 2, length, 8, generator=generator)
    key[:, :, ~known] = torch.nan
    monkeypatch.setattr("qcfuse_rag.runtime.reference_attention.MIN_ROWS", 1)  # two rows, then one
    weights = attention_weights(query, key, rows, known, AttentionParams(0.5, window=window), reduce=reduce)
    per_row = torch.zeros(4, 3, length)
    for head in range(4):
        for i, row in enumerate(rows.tolist()):
            keys = [p for p in range(row + 1) if known[p] and (window is None or row - p < window)]
            scores = torch.stack([0.5 * query[0, head, i] @ key[0, head // 2, p] for p in keys])
            per_row[head, i, keys] = scores.softmax(0)
    expected = per_row.mean((0, 1)) if reduce == "mean" else per_row.amax((0, 1))
    assert torch.allclose(weights, expected, atol=1e-6)


def test_layers_that_see_different_keys_have_their_own_blocks() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.arange(3, 400, 4)
    sets = [torch.cat([rows, torch.randperm(400, generator=generator)[:90]]).unique() for _ in range(2)]
    query = torch.randn(1, 4, len(rows), 8, generator=generator)
    key, value = (torch.randn(1, 2, 400, 8, generator=generator) for _ in range(2))
    plan = RowsPlan(rows, 400, sets)
    for layer, visible in enumerate(sets):
        module = Layer()
        module.layer_idx = layer
        out, _ = rows_attention(module, query, key, value, None, 0.3, fusion=plan)
        mask = plain_mask(rows, 400, visible, None)
        assert torch.allclose(
            out.transpose(1, 2), explicit_attention(query, key, value, mask, AttentionParams(0.3)), atol=1e-5
        )
