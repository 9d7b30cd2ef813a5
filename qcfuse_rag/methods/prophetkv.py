"""ProphetKV (arXiv 2602.02579): choose by the question's attention over the whole cache and all layers."""

from __future__ import annotations

from qcfuse_rag.fusion.method import BY_ATTENTION, FixedRatio, Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.store.key import BLIND, Base


def prophetkv(ratio: float = 0.2, base: Base = BLIND) -> Method:
    """Recompute the passage tokens the question attends to most.

    The paper sums attention over the question's rows and averages over heads and layers; a mean over rows gives the
    same order.
    """
    probe = QuestionProbe(layers="all", anchor_ratio=1.0)
    return Method(
        "prophetkv", base=base, choice=BY_ATTENTION, probe=probe, selector=TopTokens(), budget=FixedRatio(ratio)
    )
