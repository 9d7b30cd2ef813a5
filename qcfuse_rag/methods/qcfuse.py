"""QCFuse (arXiv 2606.05875): choose by the question's attention to part of the cache in three middle layers."""

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

    The defaults are from the published code of September 2026: blind caches, anchors of 15 %, three critical layers,
    mean over the question's rows, heads and layers, one global choice of half the tokens. The code of June had anchors
    of 10 %, a maximum over rows and heads, and a tenth of the tokens.

    Args:
        ratio: share of the passage tokens to recompute.
        base: which stored caches to start from.
        anchor_ratio: share of each chunk that the question sees while probing.
        layers: critical layers; by default the model's profile, or three around the middle of the depth, since the
            published lists cover only five models.
        anchors: how tokens were ranked when chunks were stored, see `ingestion.token_ranking`; rankings other than
            `instruction` are separate entries, warmed under `base.ranked(...)`.
        reduce: how to combine the question's rows and heads.
    """
    probe = QuestionProbe(layers=layers, anchor_ratio=anchor_ratio, reduce=reduce)
    return Method("qcfuse", base.ranked(anchors), probe=probe, selector=TopTokens(), budget=FixedRatio(ratio))
