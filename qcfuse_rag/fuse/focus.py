"""Cache-Craft's (arXiv 2502.15734) early termination: stop mending chunks that the question does not look at."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fuse.assembly import Assembly, Placed
from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.score import Scores, attention_weights
from qcfuse_rag.fuse.select import Selection
from qcfuse_rag.prompt.segments import Span


@dataclass(frozen=True, slots=True)
class FocusedChunks:
    """While tokens are recomputed, see which chunks the question looks at; after some layers mend only those.

    The paper finds that the focused chunks stand out after layers 10 to 15 of 32 for most questions. Here it is decided
    once, by two numbers of ours.

    Attributes:
        depth: share of the layers after which it is decided.
        share: a chunk is focused if the attention it got so far, summed over its tokens, is at least this share of what
            the most focused chunk got.
    """

    depth: float = 0.4
    share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= 1 or not 0 <= self.share <= 1:
            raise ValueError(f"depth and share must be fractions, got {self.depth} and {self.share}")

    def steer(
        self, assembly: Assembly, candidates: list[Placed], selection: Selection, scores: Scores | None, budget: int
    ) -> Focusing:
        """Return the watch over one pass."""
        last = min(int(self.depth * assembly.lm.n_layers), assembly.lm.n_layers - 1)
        asking = assembly.probe_rows().to(assembly.lm.device, non_blocking=True)
        return Focusing(assembly.prompt.chunks, asking, selection.positions, last, self.share)


@dataclass(slots=True, eq=False)
class Focusing:
    """One pass's watch.

    Attributes:
        chunks: all passages of the prompt.
        asking: `[Q]` positions of the question's rows.
        mending: `[S]` positions of reused tokens that are recomputed.
        last: the last layer that is looked at.
        share: see `FocusedChunks`.
        chosen: None: those that were mended to the end count.
    """

    chunks: tuple[Span, ...]
    asking: Tensor
    mending: Tensor
    last: int
    share: float
    chosen: Tensor | None = None
    _looks: dict[int, float] = field(default_factory=dict, repr=False)

    def enter(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Let go of the mended tokens of unfocused chunks, once."""
        if layer != self.last + 1 or not self._looks:
            return rows
        enough = self.share * max(self._looks.values())
        unfocused = torch.zeros_like(rows, dtype=torch.bool)
        for span in self.chunks:
            if self._looks[span.start] < enough:
                unfocused |= (rows >= span.start) & (rows < span.stop)
        return rows[~(unfocused & torch.isin(rows, self.mending))]

    def written(self, layer: int, rows: Tensor, buffer: KVBuffer, query: Tensor) -> None:
        """Change nothing."""

    def look(
        self,
        layer: int,
        rows: Tensor,
        query: Tensor,
        key: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        window: int | None,
    ) -> None:
        """Add what each chunk gets from the question's rows, mean over rows and heads."""
        if layer > self.last:
            return
        known = torch.ones(key.shape[2], dtype=torch.bool, device=key.device)
        own = query[:, :, torch.searchsorted(rows, self.asking)]
        weights = attention_weights(own, key, self.asking, known, scaling=scaling, softcap=softcap, window=window)
        for span in self.chunks:
            self._looks[span.start] = self._looks.get(span.start, 0.0) + float(weights[span.start : span.stop].sum())
