"""CacheBlend (Yao et al., arXiv 2405.16444): recompute the tokens whose keys and values deviate most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.errors import UnknownMethod
from qcfuse_rag.fusion.method import FixedRatio, Method, PassStart
from qcfuse_rag.fusion.selectors import TopTokens
from qcfuse_rag.methods.common import BY_CHANGE, AllTokens, DeviationProbe, Measure, deviation, stored_rows
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.layer_hooks import LayerHook
from qcfuse_rag.store.key import BLIND, Base


@dataclass(frozen=True, slots=True)
class GradualFilter:
    """Recompute all tokens up to `first_layer`, then in every layer fewer: the tokens that deviated most.

    The share of tokens falls linearly from `1 + spread` to `1 - spread` times the budget's ratio, so that its mean over
    the filtered layers is the ratio (CacheBlend, arXiv 2405.16444, section 4.3, which gives the idea and no numbers).
    Near ratio 1 the spread narrows, since no share can exceed 1.
    """

    first_layer: int = 1
    spread: float = 0.5
    measure: Measure = "key and value"

    def __post_init__(self) -> None:
        if self.first_layer < 0:
            raise ValueError(f"layer must not be negative, got {self.first_layer}")

    def make_hook(self, start: PassStart) -> GradualFilterPass:
        """Return the hook of one pass."""
        positions = start.positions
        layers = range(self.first_layer + 1, start.fused.lm.n_layers)
        shares = self.shares(start.budget / len(positions), len(layers))
        counts = {layer: max(1, round(share * len(positions))) for layer, share in zip(layers, shares, strict=True)}
        return GradualFilterPass(positions, self.measure, counts)

    def shares(self, ratio: float, layers: int) -> list[float]:
        """Return the share of tokens in each filtered layer, falling, with the ratio as their mean."""
        spread = min(self.spread, (1 - ratio) / ratio)
        if layers == 1:
            return [ratio]
        return [ratio * (1 + spread - 2 * spread * i / (layers - 1)) for i in range(layers)]


@dataclass(eq=False)
class GradualFilterPass(LayerHook):
    """The hook of one pass; `counts` are the candidates that a layer computes, and others compute all that are left."""

    candidates: Tensor
    measure: Measure
    counts: dict[int, int]
    _stored: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _deviations: Tensor | None = field(default=None, repr=False)

    def before_layer(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Keep the candidates that deviated most in the layer before, and every other row."""
        if layer in self.counts and self._deviations is not None:
            droppable = torch.isin(rows, self.candidates)
            scored = self._deviations.masked_fill(~droppable, float("inf"))
            count = min(self.counts[layer], int(droppable.sum())) + int((~droppable).sum())
            left = scored.topk(count).indices.sort().values
            rows, self._deviations = rows[left], self._deviations[left]  # which stand until a layer with attention
        self._stored = stored_rows(buffer, layer, rows)
        return rows

    def after_write(self, layer: int, rows: Tensor, buffer: KVBuffer) -> None:
        """Measure the deviation of this layer's fresh keys and values from the stored ones."""
        assert self._stored is not None
        self._deviations = deviation(stored_rows(buffer, layer, rows), self._stored, self.measure)


def cacheblend(
    ratio: float = 0.15, base: Base = BLIND, variant: Literal["paper", "release"] = "paper", layer: int = 1
) -> Method:
    """Recompute the tokens whose stored keys and values deviate most in this prompt, whatever the question.

    Args:
        ratio: share of the passage tokens to recompute; the released code uses 0.16.
        base: which stored caches to start from.
        variant: `paper` filters gradually: all tokens up to layer 1, then fewer in every layer. `release` is the
            published code: one comparison, of values only, and one set of tokens for all layers.
        layer: the first layer whose deviation is measured; layer 0 never deviates.
    """
    if variant == "paper":
        return Method(
            "cacheblend",
            base,
            choice=BY_CHANGE,
            selector=AllTokens(),
            budget=FixedRatio(ratio),
            layer_hook=GradualFilter(layer),
        )
    if variant == "release":
        probe = DeviationProbe(layer, "value")
        return Method("cacheblend", base, choice=BY_CHANGE, probe=probe, selector=TopTokens(), budget=FixedRatio(ratio))
    raise UnknownMethod(f"there is no variant {variant!r} of cacheblend; there are paper and release")
