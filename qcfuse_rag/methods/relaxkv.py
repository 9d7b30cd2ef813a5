"""RelaxKV (arXiv 2609.33503): every layer chooses its own tokens, and recomputed tokens see only each other."""

from __future__ import annotations

from typing import Literal

from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import NestedTokens
from qcfuse_rag.store.prefill_base import BLIND, Base


def relaxkv(
    ratio: float = 0.15,
    base: Base = BLIND,
    charge: Literal["layer", "average"] = "layer",
    context: Literal["selected", "all"] = "selected",
) -> Method:
    """Recompute, in each layer, the tokens that the question attends to there or in a later layer.

    Args:
        ratio: share of the passage tokens that each layer chooses.
        base: which stored caches to start from.
        charge: `layer` is as published: sets are nested, so the first layers compute the union of all layers' choices
            and more than `ratio` is computed on average. `average` lowers each layer's choice until the average over
            layers is the ratio, as in other methods.
        context: which passage tokens the recomputed tokens see: only the tokens `selected` with them, or `all`.
    """
    selector = NestedTokens(charge)
    return Method(
        "relaxkv",
        base,
        probe=QuestionProbe(layers="all"),
        selector=selector,
        budget=FixedRatio(ratio),
        context=context,
    )
