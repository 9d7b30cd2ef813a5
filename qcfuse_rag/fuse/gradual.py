"""CacheBlend's gradual filtering: begin with every token, keep those whose keys and values deviate most."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qcfuse_rag.fuse.assembly import Assembly, Placed
from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.deviation import Measure, deviation, stored_rows
from qcfuse_rag.fuse.score import Scores
from qcfuse_rag.fuse.select import Selection, candidate_positions


@dataclass(frozen=True, slots=True)
class GradualFilter:
    """Recompute all tokens up to `first_layer`, then fewer in every layer, each time those that deviated most.

    The share of tokens falls linearly from `spread` above the budget's ratio to as much below it, so that its mean over
    the filtered layers is the ratio (CacheBlend, arXiv 2405.16444, section 4.3, which gives the idea and no numbers).
    Near ratio 1 the spread narrows, since no share can exceed 1.

    Attributes:
        first_layer: the last layer computed in full, the first whose deviations are looked at.
        spread: how far shares stray from the ratio, as a fraction of it.
        measure: what deviates.
    """

    first_layer: int = 1
    spread: float = 0.5
    measure: Measure = "key and value"

    def __post_init__(self) -> None:
        if self.first_layer < 0:
            raise ValueError(f"layer must not be negative, got {self.first_layer}")

    def steer(
        self, assembly: Assembly, candidates: list[Placed], selection: Selection, scores: Scores | None, budget: int
    ) -> Filtering:
        """Return the filter of one pass."""
        positions = candidate_positions(candidates, assembly.lm.device)
        layers = range(self.first_layer + 1, assembly.lm.n_layers)
        shares = self.shares(budget / len(positions), len(layers))
        counts = {layer: max(1, round(share * len(positions))) for layer, share in zip(layers, shares, strict=True)}
        return Filtering(positions, self.measure, counts)

    def shares(self, ratio: float, layers: int) -> list[float]:
        """Return the share of tokens in each filtered layer, falling, with the ratio as their mean."""
        spread = min(self.spread, (1 - ratio) / ratio)
        if layers == 1:
            return [ratio]
        return [ratio * (1 + spread - 2 * spread * i / (layers - 1)) for i in range(layers)]


@dataclass(slots=True, eq=False)
class Filtering:
    """One pass's filter.

    Attributes:
        candidates: `[N]` positions that may be let go.
        measure: what deviates.
        counts: how many of them each layer computes; layers that are not named compute all that are left.
    """

    candidates: Tensor
    measure: Measure
    counts: dict[int, int]
    _stored: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _deviations: Tensor | None = field(default=None, repr=False)

    def enter(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Keep the tokens that deviated most in the layer before, and every row that is no candidate."""
        if layer in self.counts and self._deviations is not None:
            free = torch.isin(rows, self.candidates)
            scored = self._deviations.masked_fill(~free, float("inf"))
            count = min(self.counts[layer], int(free.sum())) + int((~free).sum())
            rows = rows[scored.topk(count).indices.sort().values]
        self._stored = stored_rows(buffer, layer, rows)
        return rows

    def written(self, layer: int, rows: Tensor, buffer: KVBuffer, query: Tensor) -> None:
        """Measure how far this layer's fresh keys and values are from the stored ones."""
        assert self._stored is not None
        self._deviations = deviation(stored_rows(buffer, layer, rows), self._stored, self.measure)
