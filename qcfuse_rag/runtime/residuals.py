"""Spread residuals: correct the keys and values of passage tokens that are not recomputed, from those that are.

The residual of a recomputed token, fresh minus stored, has a part that other tokens of its passage share, more so the
nearer they are. Their residuals are estimated from the known ones as by a Gaussian process over positions, separately
for each layer and for keys and values, before any row attends to them. AgentKVShift (arXiv 2607.21604) adds the mean of
the known residuals. A mean of few residuals is mostly noise. The process weighs the noise against the shared part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from qcfuse_rag.models.rope import AngleTables, LayerRope, angles_from, rotate
from qcfuse_rag.runtime.rows import RowsPlan


@dataclass(frozen=True, slots=True)
class ResidualKernel:
    """The covariance of the residuals of two tokens of a passage.

    Attributes:
        length: tokens over which the part that only neighbours share falls to 1/e.
        shared: share of the common variance that all tokens of the passage have in common, 0 to 1.
        noise: variance of a token's own part, as a multiple of the common variance.
    """

    length: float = 64.0
    shared: float = 0.1
    noise: float = 8.0

    def weights(self, targets: Tensor, sources: Tensor) -> Tensor:
        """Return `[N, S]` float32: how much of the residual at each of S positions each of N positions gets."""
        known = self._covariance(sources, sources) + self.noise * torch.eye(len(sources))
        weights: Tensor = torch.linalg.solve(known, self._covariance(sources, targets))
        return weights.T

    def _covariance(self, first: Tensor, second: Tensor) -> Tensor:
        distance = (first[:, None] - second[None, :]).abs().to(torch.float32)
        return self.shared + (1 - self.shared) * torch.exp(-distance / self.length)


@dataclass(frozen=True, slots=True, eq=False)
class ResidualSpread:
    """The recomputed tokens of a prompt, and the tokens that are corrected from them; on a CPU.

    Attributes:
        kernel: estimates residuals.
        ropes: rotation of each layer. Residuals of keys are compared unrotated, since rotation depends on the position.
        passages: first position and position behind the last of each passage that is not exact.
        selected: `[S]` int64 ascending, the recomputed tokens of these passages.
    """

    kernel: ResidualKernel
    ropes: Sequence[LayerRope]
    passages: Sequence[tuple[int, int]]
    selected: Tensor

    def in_pass(self, plan: RowsPlan) -> PassResiduals | None:
        """Return the residuals that the rows of a pass spread; None if they spread none.

        If the rows are computed in several passes, each token is corrected once: in the first pass that recomputes a
        later token of its passage, or else in the last pass that recomputes any.
        """
        first_row, last_row = int(plan.rows[0]), int(plan.rows[-1])
        groups: list[ResidualGroup] = []
        for start, stop in self.passages:
            inside = self.selected[(self.selected >= start) & (self.selected < stop)]
            sources = inside[(inside >= first_row) & (inside <= last_row)]
            if not len(sources):
                continue
            earlier, later = inside[inside < first_row], inside[inside > last_row]
            first = int(earlier[-1]) + 1 if len(earlier) else start
            targets = torch.arange(first, int(sources[-1]) + 1 if len(later) else stop)
            weights = self.kernel.weights(targets, sources)
            weights[torch.isin(targets, sources)] = 0  # recomputed tokens are not corrected
            groups.append(ResidualGroup(first, sources, weights))
        return PassResiduals(self.ropes, groups) if groups else None


@dataclass(frozen=True, slots=True, eq=False)
class ResidualGroup:
    """Neighbouring tokens of a passage that are corrected from some of its recomputed tokens.

    Attributes:
        first: position of the first token.
        sources: `[S]` int64 positions of the recomputed tokens.
        weights: `[N, S]` float32, see `ResidualKernel.weights`.
    """

    first: int
    sources: Tensor
    weights: Tensor


@dataclass(slots=True, eq=False)
class PassResiduals:
    """Spreads the residuals of one pass, layer by layer. Layer 0 has none, apart from rounding."""

    ropes: Sequence[LayerRope]
    groups: Sequence[ResidualGroup]
    sources: Tensor = field(init=False)
    _angles: AngleTables = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.sources = torch.cat([group.sources for group in self.groups])

    def before_write(self, layer: int, keys: Tensor, values: Tensor) -> Callable[[], None]:
        """Note the recomputed tokens' stored `[1, Hkv, capacity, D]` keys and values; return what corrects others."""
        stored = keys.index_select(2, self.sources), values.index_select(2, self.sources)
        return partial(self._spread, self.ropes[layer], keys, values, stored)

    def _spread(self, rope: LayerRope, keys: Tensor, values: Tensor, stored: tuple[Tensor, Tensor]) -> None:
        start = self.groups[0].first
        stop = self.groups[-1].first + len(self.groups[-1].weights)
        for side, old in zip((keys, values), stored, strict=True):
            residuals = side.index_select(2, self.sources).float() - old.float()
            if side is values or rope.inv_freq is None:
                side[:, :, start:stop] += self._estimates(residuals, start, stop)
                continue
            cos, sin = angles_from(self._angles, rope, start, stop, side.device)
            at = self.sources - start
            unrotated = rotate(residuals, cos[at], -sin[at], interleaved=rope.interleaved)
            corrections = self._estimates(unrotated, start, stop)
            side[:, :, start:stop] += rotate(corrections, cos, sin, interleaved=rope.interleaved)

    def _estimates(self, residuals: Tensor, start: int, stop: int) -> Tensor:
        estimates = residuals.new_zeros(*residuals.shape[:2], stop - start, residuals.shape[3])
        done = 0
        for group in self.groups:
            count, first = len(group.sources), group.first - start
            estimates[:, :, first : first + len(group.weights)] = group.weights @ residuals[:, :, done : done + count]
            done += count
        return estimates
