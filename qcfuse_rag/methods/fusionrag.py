"""FusionRAG (arXiv 2601.12904): prefill chunks behind likely neighbours; recompute what the question attends to."""

from __future__ import annotations

from typing import Literal

from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.store.prefill_base import ENRICHED, FRAMED, Base


def fusionrag(
    ratio: float = 0.15,
    base: Base = ENRICHED,
    probe: Literal["question_over_cache", "question_only"] = "question_over_cache",
    alternative: bool = True,
) -> Method:
    """Recompute the passage tokens that the question attends to in the last layer, over enriched caches.

    Args:
        ratio: share of the passage tokens to recompute.
        base: which stored caches to start from; the paper uses enriched caches, see `ingestion.enrichment`.
        probe: what the question sees on its way to the last layer: the stored chunks, or only itself. The paper can be
            read both ways.
        alternative: take the framed cache of a chunk that is not enriched yet. This is what remains of the paper's
            alternative path: chunks are addressed by system prefix and content, not by the chunks before them.
    """
    if probe not in ("question_over_cache", "question_only"):
        raise UnknownMethod(f"there is no probe {probe!r} of fusionrag, only question_over_cache and question_only")
    anchor_ratio = 1.0 if probe == "question_over_cache" else 0.0
    return Method(
        "fusionrag",
        base,
        fallbacks=(FRAMED,) if alternative and base.enriched else (),
        probe=QuestionProbe(layers="last", anchor_ratio=anchor_ratio),
        selector=TopTokens(),
        budget=FixedRatio(ratio),
    )
