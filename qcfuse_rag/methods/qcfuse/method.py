"""QCFuse (arXiv 2606.05875): choose by the question's attention to part of the cache in three middle layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qcfuse_rag.fusion.method import ATTENTION, Choice, FixedRatio, Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.methods.qcfuse.anchors import Ranking, ranked
from qcfuse_rag.methods.qcfuse.layers import critical_layers
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.key import BLIND, Base


@dataclass(frozen=True, slots=True)
class CriticalProbe:
    """A `QuestionProbe` of the model's critical layers."""

    anchor_ratio: float
    reduce: Literal["mean", "max"] = "mean"

    def found(self, lm: LanguageModel, folder: Path | None) -> tuple[int, ...]:
        """Return the critical layers, by the profile in a store's folder."""
        return critical_layers(lm, folder)

    def scores(self, fused: FusedPrompt) -> Scores:
        """Score every position of the prompt."""
        layers = critical_layers(fused.lm, fused.runner.store.folder)
        return QuestionProbe(layers=layers, anchor_ratio=self.anchor_ratio, reduce=self.reduce).scores(fused)


CHOICE = Choice("the question pays them the most attention in the model's critical layers", ATTENTION)


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
        layers: critical layers; by default those of the model's profile beside the store, or three around the middle of
            the depth, since the published lists cover only five models.
        anchors: how tokens were ranked when chunks were stored, see `anchors`; rankings other than `instruction` are
            separate entries, warmed under the base `find_base("blind+kvzip")`.
        reduce: how to combine the question's rows and heads.
    """
    checked = QuestionProbe(layers="all" if layers == "critical" else layers, anchor_ratio=anchor_ratio, reduce=reduce)
    probe = CriticalProbe(anchor_ratio, reduce) if layers == "critical" else checked
    return Method(
        "qcfuse", ranked(base, anchors), choice=CHOICE, probe=probe, selector=TopTokens(), budget=FixedRatio(ratio)
    )
