"""Selectors: turn scores and a budget into the tokens to recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qcfuse_rag.fuse.assembly import Assembly, Placed


class Selector(Protocol):
    """Chooses among the reused tokens that are not known to be exact already."""

    def select(self, candidates: list[Placed], scores: Tensor | None, budget: int) -> Tensor:
        """Choose.

        Args:
            candidates: placed chunks that are not exact.
            scores: `[T]` float32, higher is more important; None for methods without a probe.
            budget: how many tokens to choose.

        Returns:
            `[S]` int64 positions, ascending, without repetition, on the device of `scores`, else on the CPU.
        """
        ...


@dataclass(frozen=True, slots=True)
class Nothing:
    """Recompute no reused token."""

    def select(self, candidates: list[Placed], scores: Tensor | None, budget: int) -> Tensor:
        """Return no position."""
        return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The best tokens over all chunks together."""

    def select(self, candidates: list[Placed], scores: Tensor | None, budget: int) -> Tensor:
        """Return the `budget` positions of highest score."""
        assert scores is not None
        positions = candidate_positions(candidates).to(scores.device)
        best = scores[positions].topk(min(budget, len(positions))).indices
        return positions[best].sort().values


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Tokens drawn evenly over all chunks: the control every informed choice has to beat."""

    seed: int = 0

    def select(self, candidates: list[Placed], scores: Tensor | None, budget: int) -> Tensor:
        """Return `budget` positions, the same ones for the same seed and prompt length."""
        positions = candidate_positions(candidates)
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(self.seed))
        return positions[order[:budget]].sort().values


@dataclass(frozen=True, slots=True)
class ChunkHeads:
    """The first tokens of every chunk, where a chunk prefilled on its own grows an attention sink.

    Attributes:
        n_tokens: how many per chunk; None shares the budget in proportion to the chunks' lengths.
    """

    n_tokens: int | None = 16

    def __post_init__(self) -> None:
        if self.n_tokens is not None and self.n_tokens < 0:
            raise ValueError(f"n_tokens must not be negative, got {self.n_tokens}")

    def select(self, candidates: list[Placed], scores: Tensor | None, budget: int) -> Tensor:
        """Return the first positions of every chunk."""
        total = sum(len(placed.span) for placed in candidates)
        heads = []
        for placed in candidates:
            wanted = round(budget * len(placed.span) / total) if self.n_tokens is None else self.n_tokens
            heads.append(torch.arange(placed.span.start, min(placed.span.start + wanted, placed.span.stop)))
        return torch.cat(heads) if heads else torch.empty(0, dtype=torch.int64)


def candidate_positions(candidates: list[Placed]) -> Tensor:
    """Return `[N]` int64, the positions of all tokens of the candidates, ascending."""
    if not candidates:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(placed.span.start, placed.span.stop) for placed in candidates])


def inexact_chunks(assembly: Assembly) -> list[Placed]:
    """Return the placed chunks whose keys and values a full prefill would not give."""
    return [placed for placed in assembly.placed_chunks if not placed.exact]
