"""Attention in blocks: every key that a row sees is in one of its blocks, and the result equals plain attention."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qcfuse_rag.runtime.attention import dispatch
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


def seen_keys(block: AttentionBlock) -> Tensor:
    """Return which of the block's keys each of its rows sees."""
    rows, keys = block.stop - block.start, block.last_key - block.first_key
    if block.seen == "all":
        return torch.ones(rows, keys, dtype=torch.bool)
    return torch.ones(rows, keys, dtype=torch.bool).tril() if block.mask is None else block.mask == 0


ascending = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(sorted)


@given(ends=ascending, leaf=st.integers(1, 8))
@settings(deadline=None)
def test_each_key_of_a_row_is_in_one_block_and_in_order(ends: list[int], leaf: int) -> None:
    times = torch.zeros(len(ends), ends[-1], dtype=torch.int64)
    reached = [0] * len(ends)
    for block in attention_blocks(ends, leaf):
        assert set(reached[block.start : block.stop]) == {block.first_key}, "a row's blocks follow one another"
        reached[block.start : block.stop] = [block.last_key] * (block.stop - block.start)
        assert seen_keys(block).any(1).all(), "every row of a block has a key: a softmax over none is undefined"
        times[block.start : block.stop, block.first_key : block.last_key] += seen_keys(block)
    assert torch.equal(times, (torch.arange(ends[-1]) < torch.tensor(ends)[:, None]).long())


def test_only_staircases_have_masks_and_those_are_small() -> None:
    ends = sorted(int(end) for end in torch.randperm(8000, generator=torch.Generator().manual_seed(0))[:800] + 1)
    masks = [block.mask for block in attention_blocks(ends) if block.mask is not None]
    assert len(masks) == 800 // 50  # rows are halved until 64 at most are left
    assert sum(mask.numel() for mask in masks) < 0.15 * sum(ends)


def test_neighbouring_rows_need_no_mask() -> None:
    assert [block.seen for block in attention_blocks(list(range(500, 900)), 8)] == ["all", "causal"]
    assert attention_blocks([70], 8) == [AttentionBlock(0, 1, 0, 70, "all")]


def test_a_row_far_behind_the_others_has_a_block_of_its_own() -> None:
    """As in a decode step that heals rows in the middle of the prompt."""
    blocks = attention_blocks([*range(101, 117), 900])
    assert [(block.start, block.stop, block.seen) for block in blocks] == [
        (0, 17, "all"),
        (0, 16, "causal"),
        (16, 17, "all"),
    ]
    assert sum(block.last_key - block.first_key for block in blocks if block.stop == 17) == 900


def test_a_row_that_sees_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="no key at all"):
        attention_blocks([0, 3], 8)


@given(plan=plans(), leaf=st.integers(1, 8), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]), loud=st.booleans())
@settings(deadline=None)
def test_attention_in_blocks_equals_explicit_attention(
    plan: tuple[Tensor, int, Tensor | None, int | None], leaf: int, heads: tuple[int, int], loud: bool
) -> None:
    rows, length, visible, _ = plan
    keys = torch.arange(length) if visible is None else visible
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(2, len(rows), heads[0], 16, generator=generator).transpose(1, 2) * (300 if loud else 1)
    key, value = (torch.randn(2, heads[1], length + 3, 16, generator=generator)[:, :, :length] for _ in range(2))
    key, value = (side if visible is None else side.index_select(2, keys) for side in (key, value))
    assert supports_cpu_blocks(query, key, value)
    ends = [bisect_right(keys.tolist(), row) for row in rows.tolist()]
    out = attend_in_blocks(query, key, value, attention_blocks(ends, leaf), 0.3)
    expected = explicit_attention(query, key, value, plain_mask(rows, length, visible, None)[:, keys], 0.3)
    # Scores of some thousands are rounded to a ten-thousandth.
    assert torch.allclose(out.transpose(1, 2), expected, atol=1e-3 if loud else 1e-5)


@pytest.mark.parametrize("window", [None, 200, 7])
def test_plans_use_blocks_unless_a_window_is_narrower(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def attend(*args: Any) -> Tensor:
        calls.append(args)
        return attend_in_blocks(*args)

    monkeypatch.setattr(dispatch, "attend_in_blocks", attend)
    generator = torch.Generator().manual_seed(3)
    rows = torch.cat([torch.randperm(150, generator=generator)[:130].sort().values, torch.arange(150, 160)])
    query = torch.randn(1, 4, len(rows), 8, generator=generator)
    key, value = (torch.randn(1, 2, 160, 8, generator=generator) for _ in range(2))
    plan = RowsPlan(rows, 160)
    out, _ = rows_attention(Layer(), query, key, value, None, 0.3, fusion=plan, sliding_window=window)
    expected = explicit_attention(query, key, value, plain_mask(rows, 160, None, window), 0.3)
    assert torch.allclose(out.transpose(1, 2), expected, atol=1e-5)
    assert len(calls) == (window != 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_and_layouts_are_left_to_torch(dtype: torch.dtype) -> None:
    assert not supports_cpu_blocks(*(torch.zeros(1, 2, 3, 8, dtype=dtype) for _ in range(3)))
    assert not supports_cpu_blocks(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 4))
    assert not supports_cpu_blocks(*(torch.zeros(1, 2, 8, 3).mT for _ in range(3)))
    assert not supports_cpu_blocks(*(torch.zeros(1, 2, 3, 8, requires_grad=True) for _ in range(3)))


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
        assert torch.allclose(out.transpose(1, 2), explicit_attention(query, key, value, mask, 0.3), atol=1e-5)
