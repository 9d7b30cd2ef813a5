"""A probe that does not run: what each token looked at before its chunk, measured when the chunk was born."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcfuse_rag.fuse.assembly import Assembly
from qcfuse_rag.fuse.score import Scores


@dataclass(frozen=True, slots=True)
class InterProbe:
    """Cache-Craft's (arXiv 2502.15734) score: tokens that looked at earlier chunks are those another context changes.

    Does not depend on the question. Of chunks that were not captured the first tokens come first: there a chunk read
    without a context differs most.
    """

    def scores(self, assembly: Assembly) -> Scores:
        """Score every position; nothing is computed."""
        device = assembly.lm.device
        by_layer = torch.zeros(1, len(assembly.prompt), dtype=torch.float32, device=device)
        for placed in assembly.placed_chunks:
            score = -torch.arange(len(placed.span), dtype=torch.float32, device=device)
            if "inter" in placed.chunk.extras:
                score = placed.chunk.blocks["inter"][:, 0].to(device)
            by_layer[0, placed.span.start : placed.span.stop] = score
        return Scores(by_layer, (0,))
