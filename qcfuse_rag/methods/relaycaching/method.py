"""RelayCaching (Geng et al., arXiv 2603.13289): reuse what was computed while a text was generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.fusion.adapters import AdaptedChunk, PlacementContext
from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.deviation import stored_rows
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.selectors import AllTokens, Selection, candidate_positions
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.methods.relaycaching.answer_cache import GENERATED
from qcfuse_rag.runtime.attention.scores import Scores, attention_weights
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.prefill_base import FRAMED, Base


@dataclass(frozen=True, slots=True)
class RelayLayers:
    """Where a generated text's keys and values begin to deviate, are looked at, and cease to.

    Attributes:
        start: layers below it keep what is stored.
        detect: from `start` to here all tokens are recomputed; here some are chosen.
        end: the chosen ones are recomputed up to this layer, it included; layers above keep what is stored.

    Raises:
        ValueError: if they are not `0 <= start <= detect <= end`.
    """

    start: int
    detect: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.detect <= self.end:
            raise ValueError(f"layers must be 0 <= start <= detect <= end, got {self.start}, {self.detect}, {self.end}")

    @classmethod
    def by_depth(cls, n_layers: int) -> Self:
        """Guess: the middle half of the depth deviates, which one layer shows."""
        start = n_layers // 4
        detect = min(start + 1, n_layers - 1)
        return cls(start, detect, max(detect, min(3 * n_layers // 4, n_layers - 1)))


def token_cosines(one: Tensor, other: Tensor) -> Tensor:
    """Return `[n]` float32, the cosine of each token's values `[1, Hkv, n, D]` over all heads."""
    return functional.cosine_similarity(_flat(one), _flat(other), dim=-1)


def _flat(values: Tensor) -> Tensor:
    return values[0].transpose(0, 1).flatten(1).float()


@dataclass(frozen=True, slots=True)
class PreferGenerated:
    """Place what was kept of a chunk's generation; else what the store has under the method's base.

    A chunk that is exact under the base stays as it is: what was generated behind another prompt never is.
    """

    def adapt(self, place: PlacementContext, found: ChunkKV | Miss) -> AdaptedChunk | Miss:
        """Choose."""
        prefix_ids, before = place.prompt.prefix_ids, place.prompt.ids[: place.span.start]
        exact = place.base.exact_behind(before, prefix_ids)
        if isinstance(found, ChunkKV) and exact:
            return AdaptedChunk(found, exact=True)
        key = GENERATED.key(place.lm.fingerprint, prefix_ids, place.span.segment.stored_ids)
        generated = place.store.get(key)
        if isinstance(generated, ChunkKV):
            return AdaptedChunk(generated, note="as generated", key=key)
        return AdaptedChunk(found) if isinstance(found, ChunkKV) else found


@dataclass(frozen=True, slots=True)
class RelayRepair:
    """Recompute all tokens for a few layers, then those that deviate or matter to the end of the prompt.

    A token is chosen if its values deviate at least `deviation` times as much as they do on average, or if the last
    tokens of the prompt look at it at least `influence` times as much as on average. Averages are over all candidates.

    The hidden states that enter layer `start` have to come from somewhere, and none are stored: tokens pass through the
    layers below it, but what is stored stays in place there. At `detect` everybody's fresh keys and values stay, since
    they are there.

    Attributes:
        layers: where; None goes by depth.
        deviation: threshold on one minus the cosine of stored and fresh values, in means.
        influence: threshold on attention received, in means.
        suffix: how many tokens at the prompt's end look.
        fixed: choose as many tokens as the budget says, those highest above or least below their thresholds; and by
            default in all layers instead of the middle ones, as a ratio means it in every method.
    """

    layers: RelayLayers | None = None
    deviation: float = 1.5
    influence: float = 1.45
    suffix: int = 10
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.deviation <= 0 or self.influence <= 0 or self.suffix < 1:
            raise ValueError("thresholds must be above 0, and at least one token must look")

    def layers_of(self, lm: LanguageModel) -> RelayLayers:
        """Return the layers for a model.

        Raises:
            ValueError: if the model has no such layer.
        """
        layers = self.layers
        if layers is None:
            layers = RelayLayers.by_depth(lm.n_layers)
            return RelayLayers(0, layers.detect, lm.n_layers - 1) if self.fixed else layers
        if layers.end >= lm.n_layers:
            raise ValueError(f"the model has {lm.n_layers} layers, the method asks for layer {layers.end}")
        return layers

    def steer(
        self,
        fused: FusedPrompt,
        candidates: list[PlacedChunk],
        selection: Selection,
        scores: Scores | None,
        budget: int,
    ) -> RelayRepairPass:
        """Return the repair of one pass."""
        positions = candidate_positions(candidates, fused.lm.device)
        return RelayRepairPass(positions, self, self.layers_of(fused.lm), budget if self.fixed else None)


@dataclass(slots=True, eq=False)
class RelayRepairPass:
    """One pass's repair.

    Attributes:
        candidates: `[N]` positions of all reused tokens that may deviate.
        repair: thresholds.
        layers: where.
        budget: how many tokens to choose, or None for those above the thresholds.
        chosen: `[S]` positions, once they are known.
    """

    candidates: Tensor
    repair: RelayRepair
    layers: RelayLayers
    budget: int | None
    chosen: Tensor | None = None
    _stored: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _deviation: Tensor | None = field(default=None, repr=False)

    def enter(self, layer: int, rows: Tensor, buffer: KVBuffer) -> Tensor:
        """Keep all rows up to the detection, the chosen ones up to the end, and what is no candidate for good."""
        if layer < self.layers.start or layer == self.layers.detect:
            self._stored = stored_rows(buffer, layer, self.candidates)
        if layer <= self.layers.detect:
            return rows
        free = torch.isin(rows, self.candidates)
        if layer <= self.layers.end and self.chosen is not None:
            free &= ~torch.isin(rows, self.chosen)
        return rows[~free]

    def written(self, layer: int, rows: Tensor, buffer: KVBuffer, query: Tensor) -> None:
        """Below the start, put back what was stored; at the detection, see what deviates."""
        if layer > self.layers.detect or self._stored is None:
            return
        if layer < self.layers.start:
            buffer.keys[layer][:, :, self.candidates], buffer.values[layer][:, :, self.candidates] = self._stored
        elif layer == self.layers.detect:
            fresh = buffer.values[layer][:, :, self.candidates]
            self._deviation = (1 - token_cosines(self._stored[1], fresh)).clamp_min(0)
            self._stored = None

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
        """At the detection, see what the prompt's last tokens look at, and choose."""
        if layer != self.layers.detect or self._deviation is None:
            return
        last = rows[-self.repair.suffix :]
        known = torch.ones(key.shape[2], dtype=torch.bool, device=key.device)
        looks = attention_weights(
            query[:, :, -len(last) :], key, last, known, scaling=scaling, softcap=softcap, window=window
        )
        deviation = _in_means(self._deviation) / self.repair.deviation
        influence = _in_means(looks[self.candidates]) / self.repair.influence
        score = torch.maximum(deviation, influence)
        count = int((score >= 1).sum()) if self.budget is None else self.budget
        best = score.argsort(descending=True, stable=True)[:count]
        self.chosen = self.candidates[best.sort().values]


def _in_means(values: Tensor) -> Tensor:
    """Return values as multiples of their mean; zeros if all are."""
    return values / values.mean().clamp_min(torch.finfo(values.dtype).tiny)


def relaycaching(
    ratio: float | None = None,
    base: Base = FRAMED,
    layers: RelayLayers | None = None,
    deviation: float = 1.5,
    influence: float = 1.45,
    suffix: int = 10,
) -> Method:
    """Recompute generated text in the middle layers, at the tokens that deviate or that the question's end looks at.

    Args:
        ratio: share of the tokens to choose, recomputed in all layers; None for the published thresholds and layers.
        base: which stored caches stand in for chunks that were not kept with `FusionEngine.put_generated`.
        layers: the layers at which to begin, choose and end; by depth if None.
        deviation: choose tokens whose values deviate so many times the mean.
        influence: choose tokens looked at so many times the mean.
        suffix: how many tokens at the end of the prompt look.
    """
    repair = RelayRepair(layers, deviation, influence, suffix, fixed=ratio is not None)
    budget = None if ratio is None else FixedRatio(ratio)
    return Method("relaycaching", base, PreferGenerated(), selector=AllTokens(), budget=budget, layer_hook=repair)
