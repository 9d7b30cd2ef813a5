"""RelaxKV (arXiv 2609.33503): every layer chooses its own tokens, and recomputed tokens see only each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.fusion.method import ATTENTION, Choice, FixedRatio, Method, PassStart
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.fusion.selectors import Selection, candidate_positions
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.layer_hooks import HookedPass, LayerHook
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.key import BLIND, Base


@dataclass(frozen=True, slots=True)
class NestedTokens:
    """The best tokens of each scored layer, recomputed from the first layer to the last that chose them.

    Importance is scaled to [0, 1] within each layer. A token chosen in layer l is computed in all layers below, because
    its hidden state depends on them, so the sets shrink with depth.
    """

    charge: Literal["layer", "average"] = "layer"

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return every token that a layer chose."""
        assert scores is not None
        return Selection(self.nested(candidates, scores, budget)[0])

    def nested(self, candidates: list[PlacedChunk], scores: Scores, budget: int) -> tuple[Tensor, Tensor]:
        """Return `[S]` positions of the tokens that a layer chose, and `[S]` the last layer that chose each."""
        device = scores.by_layer.device
        positions = candidate_positions(candidates, device)
        if not len(positions):
            return positions, positions
        order = scores.by_layer[:, positions].argsort(dim=1, descending=True, stable=True)
        layers = torch.tensor(scores.layers, device=device)
        count = min(budget, len(positions))
        if self.charge == "average":
            count = self._affordable(order, layers, count)
        until = _deepest(order[:, :count], layers, len(positions))
        chosen = until >= 0
        return positions[chosen], until[chosen]

    @staticmethod
    def _affordable(order: Tensor, layers: Tensor, budget: int) -> int:
        """Return the most tokens a layer may choose so that the average over layers stays within the budget."""
        low, high = 1, budget
        while low < high:
            middle = (low + high + 1) // 2
            until = _deepest(order[:, :middle], layers, order.shape[1])
            within = int((until + 1).sum()) <= budget * (int(layers[-1]) + 1)
            low, high = (middle, high) if within else (low, middle - 1)
        return low


def _deepest(chosen: Tensor, layers: Tensor, candidates: int) -> Tensor:
    """Return `[candidates]`, the last layer that chose each, or -1. `chosen`: `[n_layers, count]` indices."""
    until = torch.full((candidates,), -1, dtype=torch.int64, device=chosen.device)
    for layer, indices in zip(layers, chosen, strict=True):  # ascending, so later layers overwrite earlier ones
        until[indices] = layer
    return until


@dataclass(frozen=True, slots=True)
class NestedPasses:
    """Ends each recomputed token behind the last layer that chose it."""

    tokens: NestedTokens
    context: Literal["selected", "all"]

    def make_hook(self, start: PassStart) -> NestedRows:
        """Return the hook of one pass; tokens that must not see the others are computed here, before that pass."""
        assert start.scores is not None
        positions, until = (
            part.to(start.fused.lm.device) for part in self.tokens.nested(start.candidates, start.scores, start.budget)
        )
        layers = torch.tensor(start.scores.layers, device=until.device)
        ends = torch.cat([layers[1:] - 1, layers.new_tensor([start.fused.lm.n_layers - 1])])
        until = ends[torch.searchsorted(layers, until)]  # layers without attention go with the one before
        hook = NestedRows(positions, until, positions)
        if self.context == "all":
            return hook
        _recompute_apart(start.fused, start.candidates, hook)
        return NestedRows(positions, torch.full_like(until, -1), positions)


@dataclass(eq=False)
class NestedRows(LayerHook):
    """The hook of one pass, which ends rows `[S]` behind the last layer that each is computed in; -1 for none."""

    positions: Tensor
    until: Tensor
    chosen: Tensor | None = field(default=None)

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Drop the rows whose last layer is done."""
        ended = self.positions[self.until < layer]
        return rows[~torch.isin(rows, ended)] if len(ended) else rows


def _recompute_apart(fused: FusedPrompt, candidates: list[PlacedChunk], hook: NestedRows) -> None:
    """Compute the selected tokens, and missing tokens before them, hiding all other reused tokens from them.

    Exact chunks and text outside passages stay visible.
    """
    lm, chosen = fused.lm, hook.positions.cpu()
    length = int(chosen[-1]) + 1
    seen, is_row = torch.ones(length, dtype=torch.bool), ~fused.known[:length]
    for placed in candidates:
        seen[placed.span.start : placed.span.stop] = False
    seen[chosen], is_row[chosen] = True, True
    visible = [seen.nonzero()[:, 0]] * lm.n_layers
    plan = RowsPlan.of(is_row.nonzero()[:, 0], lm.sliding, device=lm.device, visible=visible)
    buffer = fused.await_all()
    hooked = HookedPass(plan, hook, buffer)
    fused.runner.prefills.hidden(fused.ids[plan.rows], plan, buffer, depth=lm.n_layers, hooked_pass=hooked)
    fused.row_layers += hooked.row_layers


CHOICE = Choice("in at least one layer the question pays them the most attention", ATTENTION)


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
    tokens = NestedTokens(charge)
    return Method(
        "relaxkv",
        base,
        choice=CHOICE,
        probe=QuestionProbe(layers="all"),
        selector=tokens,
        budget=FixedRatio(ratio),
        layer_hook=NestedPasses(tokens, context),
    )
