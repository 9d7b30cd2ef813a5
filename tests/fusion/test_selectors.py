"""Splitting a budget: whole shares in proportion to weights, each within its limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qcfuse_rag.methods.common import split_budget

PARTS = st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 50)), min_size=1, max_size=8)


@given(PARTS, st.integers(0, 500))
def test_shares_add_up_to_the_budget_or_to_all_that_fits(parts: list[tuple[float, int]], budget: int) -> None:
    weights, limits = [weight for weight, _ in parts], [limit for _, limit in parts]
    shares = split_budget(budget, weights, limits)
    assert sum(shares) == min(budget, sum(limits))
    assert all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 20))
def test_equal_weights_get_equal_shares_up_to_one(limits: list[int], share: int) -> None:
    roomy = [limit + share for limit in limits]
    shares = split_budget(share * len(roomy), [1.0] * len(roomy), roomy)
    assert max(shares) - min(shares) <= 1
