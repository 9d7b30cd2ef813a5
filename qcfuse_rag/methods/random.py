"""Random tokens: the control for all methods that choose tokens."""

from __future__ import annotations

from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.selectors import RandomTokens
from qcfuse_rag.store.prefill_base import FRAMED, Base


def random(ratio: float = 0.15, base: Base = FRAMED, seed: int = 0) -> Method:
    """Recompute a random share of the passage tokens."""
    return Method("random", base=base, selector=RandomTokens(seed), budget=FixedRatio(ratio))
