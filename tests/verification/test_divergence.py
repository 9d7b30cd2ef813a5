"""The divergence of two predictions: 0 where they agree, and never a good figure for numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch

from qcfuse_rag.verification.divergence import divergence

NAN, INF = float("nan"), float("inf")


def test_equal_predictions_do_not_diverge() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert divergence(logits, logits) == 0
    assert divergence(logits, logits + 3) == pytest.approx(0, abs=1e-12)


def test_it_is_the_sum_over_tokens() -> None:
    found = divergence(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log())
    assert found == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))


def test_a_token_that_both_rule_out_adds_nothing() -> None:
    assert divergence(torch.tensor([-INF, 1.0, 1.0]), torch.tensor([-INF, 2.0, 2.0])) == pytest.approx(0)


@pytest.mark.parametrize("wrong", [0, 1])
def test_logits_that_are_no_numbers_do_not_agree_with_any(wrong: int) -> None:
    logits = [torch.ones(4), torch.ones(4)]
    logits[wrong][2] = NAN
    assert math.isnan(divergence(*logits))
