"""Selectors: turn scores and a budget into the tokens to recompute."""

from __future__ import annotations

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
    """

    positions: Tensor

    @classmethod
    def none(cls) -> Selection:
        """Recompute nothing."""
        return cls(torch.empty(0, dtype=torch.int64))

    def to(self, device: torch.device) -> Selection:
        """Return the same selection on a device."""
        return Selection(to_device(self.positions, device))


class Selector(Protocol):
    """Chooses among the reused tokens that are not exact."""

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Choose as many of the candidates' tokens as the budget has; scores are None for methods without a probe."""
        ...


@dataclass(frozen=True, slots=True)
class SelectNone:
    """Recompute no reused token."""

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return no position."""
        return Selection.none()


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
    """Check that a selector kept to its contract: that what was recomputed is stored, inexact and within a limit.

    `known` is `[T]` bool on the CPU; there is no limit if a layer hook shrinks the set later.

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
