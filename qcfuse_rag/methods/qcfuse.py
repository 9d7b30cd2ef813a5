"""QCFuse (arXiv 2606.05875): choose by the question's attention to part of the cache in three middle layers."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qcfuse_rag.fusion.method import ATTENTION, Choice, FixedRatio, Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.methods.rankings import Ranking, ranked
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.key import BLIND, Base

LOG = logging.getLogger(__name__)
FORMAT = "qcfuse-profile-1"
MAKE_AGAIN = "make it again with `python -m benchmarks profile`"
PROFILE_FILE = "profile.json"
"""File name of a profile in the folder of a store; `python -m benchmarks profile` makes one."""


def layers_by_depth(n_layers: int) -> tuple[int, ...]:
    """Return the three layers around 0.53 of the depth: the default for a model without a profile.

    QCFuse (arXiv 2606.05875) publishes lists for the Llama, Mistral and Qwen3 8B models. There, attention from question
    to evidence is sharpest between 0.41 and 0.59 of the depth. For a model of one or two layers, return all layers.
    """
    middle = min(max(round(0.53 * n_layers), 1), n_layers - 2)
    return tuple(layer for layer in (middle - 1, middle, middle + 1) if 0 <= layer < n_layers)


def critical_layers(lm: LanguageModel, folder: Path | None) -> tuple[int, ...]:
    """Return a model's critical layers, ascending.

    Args:
        lm: the model.
        folder: a store's folder, which may hold a profile. One that is of another model or cannot be read is logged.
    """
    path = None if folder is None else folder / PROFILE_FILE
    if path is not None and path.exists():
        try:
            return _profiled(lm, json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            LOG.warning("the profile %s is not used: %s; %s", path, error, MAKE_AGAIN)
    return tuple(lm.attention_layers[index] for index in layers_by_depth(len(lm.attention_layers)))


def _profiled(lm: LanguageModel, profile: dict[str, object]) -> tuple[int, ...]:
    layers, recall, fingerprint = profile["layers"], profile["recall"], profile["fingerprint"]
    if profile["format"] != FORMAT or not isinstance(layers, list) or not isinstance(recall, list):
        raise ValueError(f"its format is not {FORMAT}")
    differing = lm.fingerprint.differences(dict(fingerprint))  # type: ignore[call-overload]
    if differing:
        raise ValueError(f"it is of another model ({profile['model']}): {', '.join(differing)} differ")
    if len(recall) != lm.n_layers:
        raise ValueError(f"it has {len(recall)} layers and the model {lm.n_layers}")
    if not layers or any(type(layer) is not int or layer not in lm.attention_layers for layer in layers):
        raise ValueError(f"layers must be indices of the {len(lm.attention_layers)} layers that have attention")
    return tuple(sorted(set(layers)))


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
        anchors: how tokens were ranked when chunks were stored, see `rankings`; rankings other than `instruction` are
            separate entries, warmed under the base `find_base("blind+kvzip")`.
        reduce: how to combine the question's rows and heads.
    """
    checked = QuestionProbe(layers="all" if layers == "critical" else layers, anchor_ratio=anchor_ratio, reduce=reduce)
    probe = CriticalProbe(anchor_ratio, reduce) if layers == "critical" else checked
    return Method(
        "qcfuse", ranked(base, anchors), choice=CHOICE, probe=probe, selector=TopTokens(), budget=FixedRatio(ratio)
    )
