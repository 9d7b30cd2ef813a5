"""QCFuse (arXiv 2606.05875): the question probes a digest of the cache, three middle layers choose."""

from __future__ import annotations

from typing import Literal

from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.store.prefill_base import BLIND, Base, Ranking


def qcfuse(
    ratio: float = 0.5,
    base: Base = BLIND,
    anchor_ratio: float = 0.15,
    layers: Literal["critical"] | tuple[int, ...] = "critical",
    anchors: Ranking = "instruction",
    reduce: Literal["mean", "max"] = "mean",
) -> Method:
    """Recompute the passage tokens that the question attends to in the critical layers.

    The defaults are those of the published code of September 2026: blind caches, anchors of 15 %, three critical
    layers, mean over the question's rows, heads and layers, one global choice of half the tokens. The code of June had
    anchors of 10 %, a maximum over rows and heads, and a tenth of the tokens.

    Args:
        ratio: share of the passage tokens to recompute.
        base: which stored caches to start from.
        anchor_ratio: share of each chunk that the question sees while probing.
        layers: critical layers; by default the model's profile, or three around the middle of the depth, since the
            published lists cover five models only.
        anchors: how chunks were ranked when they were stored, see `ingestion.token_ranking`; other rankings than `instruction`
            are entries of their own, to be warmed under `base.ranked(...)`.
        reduce: over the question's rows and heads.
    """
    probe = QuestionProbe(layers=layers, anchor_ratio=anchor_ratio, reduce=reduce)
    return Method("qcfuse", base.ranked(anchors), probe=probe, selector=TopTokens(), budget=FixedRatio(ratio))
