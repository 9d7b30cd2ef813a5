"""Our own: primed caches, all of the prompt's end asks, the upper layers choose, and a guard; see docs/notes/auto.md."""

from __future__ import annotations

from typing import Literal

from qcfuse_rag.fusion.adapters import FallbackBases
from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.guard import BreakEven
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import ProbeLayers, QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.store.prefill_base import FRAMED, PRIMED, Base


def auto(
    ratio: float = 0.05,
    base: Base = PRIMED,
    layers: ProbeLayers = "upper",
    rows: Literal["suffix", "question"] = "suffix",
    normalized: bool = True,
    exact_first: bool = True,
    guard: bool = True,
) -> Method:
    """Recompute few tokens over caches that know they are not the first, unless computing all is faster.

    Each part can be switched off; what each is worth is in docs/notes/auto.md.

    Args:
        ratio: share of the passage tokens to recompute.
        base: which stored caches to start from, see `ingestion.primer`.
        layers: whose attention counts: the `upper` half, which needs no profile, or the `third_quarter`, after which
            the last quarter of the caches may still be on their way; see `fusion.probes`.
        rows: what asks: the question, or the `suffix`, all that stands behind the passages.
        normalized: every layer has as much of a say as the others.
        exact_first: the prompt's first passage is taken framed, which is exact.
        guard: compute everything where that is predicted to be faster.
    """
    return Method(
        "auto",
        base,
        adapter=FallbackBases((FRAMED,), exact_first=exact_first),
        probe=QuestionProbe(layers=layers, rows=rows, normalized=normalized),
        selector=TopTokens(),
        budget=FixedRatio(ratio),
        guard=BreakEven() if guard else None,
    )
