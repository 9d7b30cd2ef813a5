"""How far one prediction of the first token is from another."""

from __future__ import annotations

from torch import Tensor


def divergence(oracle: Tensor, other: Tensor) -> float:
    """Return the Kullback-Leibler divergence KL(oracle || other) of two `[vocabulary]` logits, in nats."""
    expected, found = oracle.double().log_softmax(-1), other.double().log_softmax(-1)
    return max(0.0, float((expected.exp() * (expected - found)).sum()))
