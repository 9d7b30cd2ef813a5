"""Random tokens: the control for all methods that choose tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcfuse_rag.fusion.method import Choice, FixedRatio, Method
from qcfuse_rag.fusion.selectors import Selection, candidate_positions
from qcfuse_rag.fusion.state import PlacedChunk
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.store.key import FRAMED, Base


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Random tokens over all chunks: the control that every informed choice has to beat."""

    seed: int = 0

    def select(self, candidates: list[PlacedChunk], scores: Scores | None, budget: int) -> Selection:
        """Return `budget` positions, the same ones for the same seed and prompt length."""
        positions = candidate_positions(candidates)
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(self.seed))
        return Selection(positions[order[:budget]].sort().values)


CHOICE = Choice("the method chooses at random; it is the control that other methods are compared with")


def random(ratio: float = 0.15, base: Base = FRAMED, seed: int = 0) -> Method:
    """Recompute a random share of the passage tokens."""
    return Method("random", base=base, choice=CHOICE, selector=RandomTokens(seed), budget=FixedRatio(ratio))
