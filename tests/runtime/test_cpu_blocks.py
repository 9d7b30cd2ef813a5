"""Attention in rectangles: every key a row sees is in one of its rectangles, and the result is the plain one's."""

from __future__ import annotations

from bisect import bisect_right

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qcfuse_rag.runtime.attention import dispatch as attention
from qcfuse_rag.runtime.attention.cpu_blocks import (
    AttentionBlock,
    attend_in_blocks,
    attention_blocks,
    supports_cpu_blocks,
)
from qcfuse_rag.runtime.attention.dispatch import rows_attention
from qcfuse_rag.runtime.reference_attention import explicit_attention
from qcfuse_rag.runtime.rows import RowsPlan
from tests.runtime.test_attention import Layer, plain_mask, plans


def shown(one: AttentionBlock) -> Tensor:
    """Return which of its keys each row of a rectangle sees."""
    rows, keys = one.stop - one.start, one.last_key - one.first_key
    if one.seen == "all":
        return torch.ones(rows, keys, dtype=torch.bool)
    return torch.ones(rows, keys, dtype=torch.bool).tril() if one.mask is None else one.mask == 0


ascending = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(sorted)


@given(ends=ascending, leaf=st.integers(1, 8))
@settings(deadline=None)
def test_each_row_finds_each_of_its_keys_once_and_in_order(ends: list[int], leaf: int) -> None:
    times = torch.zeros(len(ends), ends[-1], dtype=torch.int64)
    reached = [0] * len(ends)
    for one in attention_blocks(ends, leaf):
        assert set(reached[one.start : one.stop]) == {one.first_key}, "a row's rectangles follow one another"
        reached[one.start : one.stop] = [one.last_key] * (one.stop - one.start)
        assert shown(one).any(1).all(), "no row is left without a key, whose softmax would be of nothing"
        times[one.start : one.stop, one.first_key : one.last_key] += shown(one)
    assert torch.equal(times, (torch.arange(ends[-1]) < torch.tensor(ends)[:, None]).long())


def test_only_stairs_have_masks_and_those_are_small() -> None:
    ends = sorted(int(end) for end in torch.randperm(8000, generator=torch.Generator().manual_seed(0))[:800] + 1)
    found = attention_blocks(ends)
    assert sum(one.mask is not None for one in found) == 800 // 50  # halves of halves, until there are 64 at most
    assert sum(one.mask.numel() for one in found if one.mask is not None) < 0.15 * sum(ends)


def test_rows_side_by_side_need_no_mask_at_all() -> None:
    assert [one.seen for one in attention_blocks(list(range(500, 900)), 8)] == ["all", "causal"]
    assert attention_blocks([70], 8) == [AttentionBlock(0, 1, 0, 70, "all")]


def test_a_row_that_sees_nothing_is_told() -> None:
    with pytest.raises(ValueError, match="no key at all"):
        attention_blocks([0, 3], 8)


@given(plan=plans(), leaf=st.integers(1, 8), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]), loud=st.booleans())
@settings(deadline=None)
def test_it_equals_attention_step_by_step(
    plan: tuple[Tensor, int, Tensor | None, int | None], leaf: int, heads: tuple[int, int], loud: bool
) -> None:
    rows, length, visible, _ = plan
    keys = torch.arange(length) if visible is None else visible
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(2, len(rows), heads[0], 16, generator=generator).transpose(1, 2) * (300 if loud else 1)
    key, value = (torch.randn(2, heads[1], length + 3, 16, generator=generator)[:, :, :length] for _ in range(2))
    key, value = (one if visible is None else one.index_select(2, keys) for one in (key, value))
    assert supports_cpu_blocks(query, key, value)
    ends = [bisect_right(keys.tolist(), row) for row in rows.tolist()]
    out = attend_in_blocks(query, key, value, attention_blocks(ends, leaf), 0.3)
    expected = explicit_attention(query, key, value, plain_mask(rows, length, visible, None)[:, keys], 0.3)
    # Scores of some thousands are rounded to a ten-thousandth.
    assert torch.allclose(out.transpose(1, 2), expected, atol=1e-3 if loud else 1e-5)


@pytest.mark.parametrize("window", [None, 200, 7])
def test_plans_are_attended_to_in_rectangles_where_no_window_is_narrower(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    own = attention.attend_in_blocks
    monkeypatch.setattr(attention, "attend_in_blocks", lambda *given: taken.append(given) or own(*given))
    generator = torch.Generator().manual_seed(3)
    rows = torch.cat([torch.randperm(150, generator=generator)[:130].sort().values, torch.arange(150, 160)])
    query = torch.randn(1, 4, len(rows), 8, generator=generator)
    key, value = (torch.randn(1, 2, 160, 8, generator=generator) for _ in range(2))
    plan = RowsPlan(rows, 160)
    out, _ = rows_attention(Layer(), query, key, value, None, 0.3, fusion=plan, sliding_window=window)
    expected = explicit_attention(query, key, value, plain_mask(rows, 160, None, window), 0.3)
    assert torch.allclose(out.transpose(1, 2), expected, atol=1e-5)
    assert len(taken) == (window != 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_numbers_are_left_to_torch(dtype: torch.dtype) -> None:
    assert not supports_cpu_blocks(*(torch.zeros(1, 2, 3, 8, dtype=dtype) for _ in range(3)))
    assert not supports_cpu_blocks(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 4))
    assert not supports_cpu_blocks(*(torch.zeros(1, 2, 8, 3).mT for _ in range(3)))
    assert not supports_cpu_blocks(*(torch.zeros(1, 2, 3, 8, requires_grad=True) for _ in range(3)))


def test_layers_that_see_different_keys_are_cut_apart() -> None:
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
        assert torch.allclose(out.transpose(1, 2), explicit_attention(query, key, value, mask, 0.3), atol=1e-5)
