"""EPIC's LegoLink (Hu et al., arXiv 2410.15332): recompute the attention sink at the start of each chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcfuse_rag.fusion.method import Choice, FixedRatio, Method
from qcfuse_rag.fusion.selectors import Selection
from qcfuse_rag.fusion.state import PlacedChunk
from qcfuse_rag.methods.common import split_budget
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.store.key import BLIND, Base


@dataclass(frozen=True, slots=True)
class BegunBase(Base):
    """Behind copies of the first token of every prompt, which become the attention sink instead of the chunk."""

    copies: int = 4

    def prefix(self, prefix_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the copies; they do not depend on the prompt's wording."""
        return prefix_ids[:1] * self.copies


BEGUN = BegunBase("begun", after_prefix=False)
"""LegoLink-0's base."""


@dataclass(frozen=True, slots=True)
class ChunkHeads:
    """The first tokens of every chunk, where a chunk that was prefilled alone has an attention sink.

    Without a number of tokens the budget is split in proportion to the chunks' lengths.
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


CHOICE = Choice("they are the first of their passage, which was stored as if nothing stood before them")


def epic(ratio: float | None = None, base: Base | None = None, n_tokens: int = 16) -> Method:
    """Recompute the first tokens of every chunk except a chunk at the start of the prompt, whatever the question.

    Args:
        ratio: share of each chunk, for comparison with other methods at equal cost; None for a fixed number of tokens.
        base: which stored caches to start from; the paper uses blind caches, and begun caches for LegoLink-0.
        n_tokens: LegoLink-k's k, used if `ratio` is None; the paper tries 2 to 32. 0 recomputes nothing.
    """
    if ratio is None:
        base = base or (BLIND if n_tokens else BEGUN)
        return Method("epic", base, choice=CHOICE, selector=ChunkHeads(n_tokens), budget=None)
    return Method("epic", base or BLIND, choice=CHOICE, selector=ChunkHeads(None), budget=FixedRatio(ratio))
