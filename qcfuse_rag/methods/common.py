"""Parts that several methods share: selectors, a ranking, and the distance of stored from fresh keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.fusion.method import Choice
from qcfuse_rag.fusion.selectors import Selection, candidate_positions
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.ingestion.prefill import SINKS
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.chunk import ChunkKV

DEMAND = "demand"
BY_CHANGE = Choice(
    "their stored keys and values differ most from what this prompt gives them", "change of keys and values"
)


@dataclass(frozen=True, slots=True)
class AllTokens:
    """Begin with every token, for passes that drop rows between layers."""

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return all positions."""
        return Selection(candidate_positions(candidates))


@dataclass(frozen=True, slots=True)
class TopPerChunk:
    """The best tokens of every chunk, each chunk with a share of the budget.

    The share is proportional to the chunk's demand (see `with_demand`) times its length, or to its length alone where
    no demand is known.

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
        demands = [float(placed.chunk.notes.get(DEMAND, 1.0)) for placed in candidates]
        if self.by_demand:
            return [min(n, math.ceil(demand * n)) for n, demand in zip(lengths, demands, strict=True)]
        wanted = [max(demand, 1e-6) * n for n, demand in zip(lengths, demands, strict=True)]
        return split_budget(budget, wanted, lengths)


def with_demand(chunk: ChunkKV, demand: float) -> ChunkKV:
    """Return a chunk to place that says which share of its tokens ought to be recomputed."""
    return replace(chunk, notes={**chunk.notes, DEMAND: demand})


def split_budget(budget: int, wanted: list[float], most: list[int]) -> list[int]:
    """Split a budget in proportion to weights above 0, each share within its own limit.

    The whole shares add up to the budget, or to the sum of the limits if that is less.
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


def order_by_key_norm(keys: Sequence[Tensor]) -> Tensor:
    """Rank tokens by rising mean norm of their keys, after the first four; `[n_layers, n_tokens]` int32.

    Args:
        keys: per layer `[Hkv, n_tokens, D]`, rotated or not.
    """
    norms = torch.stack([layer.float().norm(dim=-1).mean(0) for layer in keys])
    norms[:, :SINKS] = -torch.inf
    return norms.argsort(dim=1, stable=True).to(torch.int32)


Measure = Literal["key", "value", "key and value"]


def deviation(
    fresh: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], measure: Measure = "key and value"
) -> Tensor:
    """Return `[R]` float32, the squared distance of keys, values or both, summed over heads and channels.

    Fresh and stored are keys and values `[1, Hkv, R, D]`, keys rotated to the same positions.
    """
    kinds = zip(("key", "value"), fresh, stored, strict=True)
    pairs = [(new, old) for kind, new, old in kinds if kind in measure]
    parts = [(new.float() - old.float()).square().sum((0, 1, 3)) for new, old in pairs]
    return torch.stack(parts).sum(0)


@dataclass(frozen=True, slots=True)
class DeviationProbe:
    """Compute every reused token through the first layers and score it by the change of its keys and values.

    Keys and values of layer 0 depend on the token alone and never deviate, so layer 1 is the first useful layer.

    Attributes:
        layer: the layer to compare.
        measure: squared distance of keys, of values, or both.
    """

    layer: int = 1
    measure: Measure = "key and value"

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise ValueError(f"layer must not be negative, got {self.layer}")

    def scores(self, fused: FusedPrompt) -> Scores:
        """Score every position; the stored rows are restored afterwards.

        A model with fewer layers is compared at its last layer.
        """
        lm = fused.lm
        layer = min(self.layer, lm.n_layers - 1)
        stop = max(placed.span.stop for placed in fused.placed_chunks)
        is_row = ~fused.known
        for placed in fused.placed_chunks:
            if not placed.exact:
                is_row[placed.span.start : placed.span.stop] = True
        is_row[stop:] = False
        plan = RowsPlan.of(is_row.nonzero()[:, 0], lm.sliding, device=lm.device)
        rows = plan.rows
        buffer = fused.await_all()
        saved = [stored_rows(buffer, index, rows) for index in range(layer + 1)]
        fused.runner.prefills.hidden(fused.ids[rows], plan, buffer, depth=layer + 1)
        fused.row_layers += len(rows) * (layer + 1)
        by_layer = torch.zeros(1, len(fused.prompt), dtype=torch.float32, device=lm.device)
        by_layer[0, rows] = deviation(stored_rows(buffer, layer, rows), saved[layer], self.measure)
        for index, (keys, values) in enumerate(saved):
            buffer.keys[index][:, :, rows] = keys
            buffer.values[index][:, :, rows] = values
        buffer.states.clear()
        return Scores(by_layer, (layer,))


def stored_rows(buffer: KVBuffer, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of a layer's keys and values at some positions, each `[1, Hkv, R, D]`."""
    return buffer.keys[layer][:, :, rows], buffer.values[layer][:, :, rows]
