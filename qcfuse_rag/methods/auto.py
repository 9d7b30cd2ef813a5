"""Our own: primed caches, a probe by the prompt's suffix in the upper layers, and a guard."""

from __future__ import annotations

from typing import Literal

from qcfuse_rag.fusion.method import ATTENTION, BreakEven, Choice, FixedRatio, Method, VerifiedRatio
from qcfuse_rag.fusion.probes import ProbeLayers, QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.runtime.residuals import ResidualKernel
from qcfuse_rag.store.key import FRAMED, PRIMED, Base

DEFAULT_RATIO = 0.15
"""Share of the passage tokens that `auto` recomputes without a verdict beside the store."""


CHOICE = Choice("the question and the text behind the passages pay them the most attention", ATTENTION)


def auto(
    ratio: float | None = None,
    base: Base = PRIMED,
    layers: ProbeLayers = "upper",
    rows: Literal["suffix", "question"] = "suffix",
    normalized: bool = True,
    exact_first: bool = True,
    residuals: bool = False,
    guard: bool = True,
) -> Method:
    """Recompute few tokens over primed caches, unless computing the whole prompt is faster.

    Each part can be switched off; benchmarks/results/quality.md has what each is worth.

    Args:
        ratio: share of the passage tokens to recompute; None is the ratio that the verdict of `qcfuse verify` beside
            the store recommends, or `DEFAULT_RATIO` without a verdict.
        base: which stored caches to start from, see `ingestion.primer`.
        layers: layers whose attention counts: the `upper` half, which needs no profile, or the `third_quarter`, so that
            the probe does not wait for the last quarter of the caches; see `fusion.probes`.
        rows: rows whose attention counts: all text outside the passages that is not stored, up to the end of the
            `question`, or, as the `suffix`, up to the end of the prompt.
        normalized: give every layer the same weight.
        exact_first: take the framed cache, which is exact, for the prompt's first passage.
        residuals: add estimated corrections to the keys and values of passage tokens that are not recomputed, on a
            CPU; see `runtime.residuals`. The corrections bring many answers nearer to full prefill's. With some models
            the answers lose hidden numbers. If it is False, `qcfuse verify` tries both, and the verdict chooses.
        guard: compute the whole prompt if that is predicted to be faster.
    """
    return Method(
        "auto",
        base,
        choice=CHOICE,
        fallbacks=(FRAMED,),
        exact_first=exact_first,
        probe=QuestionProbe(layers=layers, rows=rows, normalized=normalized),
        selector=TopTokens(),
        budget=VerifiedRatio(DEFAULT_RATIO) if ratio is None else FixedRatio(ratio),
        guard=BreakEven() if guard else None,
        residuals=ResidualKernel() if residuals else None,
    )
