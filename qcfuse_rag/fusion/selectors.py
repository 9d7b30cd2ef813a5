"""Selectors: turn scores and a budget into the tokens to recompute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.device import to_device


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The reused tokens to recompute.

    Attributes:
        positions: `[S]` int64 ascending, without repetition.
        until: `[S]` int64, the last layer in which each position is recomputed; None for all layers.
    """

    positions: Tensor
    until: Tensor | None = None

    @classmethod
    def none(cls) -> Selection:
        """Recompute nothing."""
        return cls(torch.empty(0, dtype=torch.int64))

    def to(self, device: torch.device) -> Selection:
        """Return the same selection on a device."""
        until = None if self.until is None else to_device(self.until, device)
        return Selection(to_device(self.positions, device), until)


class Selector(Protocol):
    """Chooses among the reused tokens that are not exact."""

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Choose.

        Args:
            candidates: placed chunks that are not exact.
            scores: from the method's probe; None for methods without a probe.
            budget: number of tokens to choose.

        Returns:
            Positions of candidates' tokens, without repetition.
        """
        ...


@dataclass(frozen=True, slots=True)
class SelectNone:
    """Recompute no reused token."""

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return no position."""
        return Selection.none()


@dataclass(frozen=True, slots=True)
class AllTokens:
    """Begin with every token, for passes that drop rows between layers."""

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return all positions."""
        return Selection(candidate_positions(candidates))


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The best tokens over all chunks together, by mean score over layers."""

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return the `budget` positions of highest score."""
        assert scores is not None
        total = scores.mean
        positions = candidate_positions(candidates, total.device)
        best = total[positions].topk(min(budget, len(positions))).indices
        return Selection(positions[best].sort().values)


@dataclass(frozen=True, slots=True)
class TopPerChunk:
    """The best tokens of every chunk, each chunk with a share of the budget.

    The share is proportional to the chunk's demand (see `PlacedChunk.demand`) times its length, or to its length alone
    where no demand is known.

    Attributes:
        by_demand: recompute `ceil(demand * n_tokens)` tokens of each chunk, instead of splitting a budget.
    """

    by_demand: bool = False

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return the best positions of every chunk."""
        assert scores is not None
        total = scores.mean
        chosen = []
        for placed, count in zip(candidates, self._counts(candidates, budget), strict=True):
            best = total[placed.span.start : placed.span.stop].topk(count).indices
            chosen.append(best.sort().values + placed.span.start)
        return Selection(torch.cat(chosen)) if chosen else Selection.none()

    def _counts(self, candidates: list[PlacedChunk], budget: int) -> list[int]:
        lengths = [len(placed.span) for placed in candidates]
        demands = [1.0 if placed.demand is None else placed.demand for placed in candidates]
        if self.by_demand:
            return [min(n, math.ceil(demand * n)) for n, demand in zip(lengths, demands, strict=True)]
        wanted = [max(demand, 1e-6) * n for n, demand in zip(lengths, demands, strict=True)]
        return split_budget(budget, wanted, lengths)


@dataclass(frozen=True, slots=True)
class NestedTokens:
    """The best tokens of each scored layer, recomputed from the first layer to the last that chose them.

    RelaxKV (arXiv 2609.33503): importance is scaled to [0, 1] within each layer. A token chosen in layer l is computed
    in all layers below, because its hidden state depends on them, so the sets shrink with depth.

    Attributes:
        charge: the quantity that the budget limits: the tokens of one `layer`, as published, or the `average` number of
            tokens computed over all layers, which makes the cost equal to other methods' with the same budget.
    """

    charge: str = "layer"

    def __post_init__(self) -> None:
        if self.charge not in ("layer", "average"):
            raise ValueError(f"charge must be 'layer' or 'average', got {self.charge!r}")

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return every token that a layer chose, and the last layer that chose it."""
        assert scores is not None
        device = scores.by_layer.device
        positions = candidate_positions(candidates, device)
        if not len(positions):
            return Selection.none()
        order = scores.by_layer[:, positions].argsort(dim=1, descending=True, stable=True)
        layers = torch.tensor(scores.layers, device=device)
        count = min(budget, len(positions))
        if self.charge == "average":
            count = self._affordable(order, layers, count)
        until = _deepest(order[:, :count], layers, len(positions))
        chosen = until >= 0
        return Selection(positions[chosen], until[chosen])

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


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Random tokens over all chunks: the control that every informed choice has to beat."""

    seed: int = 0

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return `budget` positions, the same ones for the same seed and prompt length."""
        positions = candidate_positions(candidates)
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(self.seed))
        return Selection(positions[order[:budget]].sort().values)


@dataclass(frozen=True, slots=True)
class ChunkHeads:
    """The first tokens of every chunk, where a chunk that was prefilled alone has an attention sink.

    Attributes:
        n_tokens: tokens per chunk; None splits the budget in proportion to the chunks' lengths.
    """

    n_tokens: int | None = 16

    def __post_init__(self) -> None:
        if self.n_tokens is not None and self.n_tokens < 0:
            raise ValueError(f"n_tokens must not be negative, got {self.n_tokens}")

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return the first positions of every chunk."""
        lengths = [len(placed.span) for placed in candidates]
        if self.n_tokens is None:
            counts = split_budget(budget, [float(length) for length in lengths], lengths)
        else:
            counts = [min(self.n_tokens, length) for length in lengths]
        starts = (placed.span.start for placed in candidates)
        heads = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        return Selection(torch.cat(heads)) if heads else Selection.none()


def candidate_positions(candidates: list[PlacedChunk], device: torch.device | None = None) -> Tensor:
    """Return `[N]` int64, the positions of all tokens of the candidates, ascending; on the CPU or a device.

    They are made on the device: the host may have to wait for a large copy.
    """
    if not candidates:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(placed.span.start, placed.span.stop, device=device) for placed in candidates])


def recomputable_chunks(fused: FusedPrompt) -> list[PlacedChunk]:
    """Return the placed chunks that differ from full prefill's keys and values."""
    return [placed for placed in fused.placed_chunks if not placed.exact]


def check_selection(recomputed: list[int], candidates: list[PlacedChunk], known: Tensor, limit: int | None) -> None:
    """Check that a selector kept to its contract.

    Args:
        recomputed: the reused positions that were recomputed.
        candidates: placed chunks that are not exact.
        known: `[T]` bool on the CPU, positions that hold stored keys and values.
        limit: most tokens it may choose; None if a layer hook shrinks the set later.

    Raises:
        ValueError: if it did not; the message begins with a verb, for the method's name to stand before it.
    """
    if len(set(recomputed)) < len(recomputed) or not bool(known[recomputed].all()):
        raise ValueError("selects a token twice, or a token that is not stored")
    allowed = torch.zeros(len(known), dtype=torch.bool)
    for placed in candidates:
        allowed[placed.span.start : placed.span.stop] = True
    if not bool(allowed[recomputed].all()):
        raise ValueError("selects a token outside the inexact passages")
    if limit is not None and len(recomputed) > limit:
        raise ValueError(f"selects {len(recomputed):,} tokens, of which {limit:,} are allowed")


def split_budget(budget: int, wanted: list[float], most: list[int]) -> list[int]:
    """Split a budget in proportion to weights, each share within its own limit.

    Args:
        budget: the sum to split.
        wanted: weights, above 0.
        most: the largest share of each.

    Returns:
        Whole shares that add up to the budget, or to the sum of the limits if that is less.
    """
    shares = [0] * len(wanted)
    left = min(budget, sum(most))
    while left > 0:
        open_ = [i for i in range(len(wanted)) if shares[i] < most[i]]
        total = sum(wanted[i] for i in open_)
        exact = {i: left * wanted[i] / total for i in open_}
        given = {i: min(most[i] - shares[i], int(exact[i])) for i in open_}
        if not any(given.values()):  # only fractions are left: 1 each to the largest
            first = sorted(open_, key=lambda i: -exact[i])[:left]
            given = dict.fromkeys(first, 1)
        for i, count in given.items():
            shares[i] += count
            left -= count
    return shares


def _deepest(chosen: Tensor, layers: Tensor, candidates: int) -> Tensor:
    """Return `[candidates]`, the last layer that chose each, or -1. `chosen`: `[n_layers, count]` indices."""
    until = torch.full((candidates,), -1, dtype=torch.int64, device=chosen.device)
    for layer, indices in zip(layers, chosen, strict=True):  # ascending, so later layers overwrite earlier ones
        until[indices] = layer
    return until
