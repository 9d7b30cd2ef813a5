"""Compare two predictions of the first token."""

from __future__ import annotations

from torch import Tensor


def divergence(oracle: Tensor, other: Tensor) -> float:
    """Return the Kullback-Leibler divergence KL(oracle || other) of two `[vocabulary]` logits, in nats."""
    log_p, log_q = oracle.double().log_softmax(-1), other.double().log_softmax(-1)
    return max(0.0, float((log_p.exp() * (log_p - log_q)).sum()))
