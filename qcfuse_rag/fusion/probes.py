"""Probes: run the question over the stored caches and score the tokens by its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from qcfuse_rag.fusion.selectors import candidate_positions, recomputable_chunks
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.runtime.attention.scores import Scores, attention_weights
from qcfuse_rag.runtime.device import to_device
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan

NamedLayers = Literal["all", "upper", "third_quarter", "last"]
NAMED: tuple[str, ...] = get_args(NamedLayers)
ProbeLayers = NamedLayers | tuple[int, ...]
"""The layers whose attention a probe counts."""


class Probe(Protocol):
    """Scores the tokens of a prompt whose stored chunks have been placed."""

    def scores(self, fused: FusedPrompt) -> Scores:
        """Score every position; the buffer's stored rows stay as they were, and `fused.row_layers` grows."""
        ...


@runtime_checkable
class ReadsFolder(Protocol):
    """A probe that also depends on a file in the store's folder."""

    def found(self, lm: LanguageModel, folder: Path | None) -> object:
        """Return what the file says; verdicts on the method hold for this alone."""
        ...


@dataclass(frozen=True, slots=True)
class QuestionProbe:
    """Run the question's rows through the first layers; a reused token's score is their attention to it.

    Attributes:
        layers: the layers whose attention counts: `all`, `upper` (the second half), `third_quarter`, `last`, or
            indices. The pass stops after the last of them; caches of later layers load while the rows are recomputed.
        anchor_ratio: the share of each chunk's tokens that the question's rows attend to, by importance; 1 is all of
            them, 0 none. All tokens are scored in either case.
        reduce: over the question's rows and the heads: `mean`, or `max`.
        rows: all text outside the passages that is not stored, up to the end of the `question`, or, as the `suffix`, up
            to the end of the prompt with the opening of the answer.
        normalized: scale each layer's attention to reused tokens that are not exact to a sum of 1, so that layers with
            little attention to the passages count as much as the others.
    """

    layers: ProbeLayers = "all"
    anchor_ratio: float = 1.0
    reduce: Literal["mean", "max"] = "mean"
    rows: Literal["question", "suffix"] = "question"
    normalized: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.anchor_ratio <= 1:
            raise ValueError(f"anchor_ratio must be in [0, 1], got {self.anchor_ratio}")
        indices = self.layers if isinstance(self.layers, list | tuple) else ()
        if self.layers not in NAMED and (not indices or min(indices) < 0):
            raise ValueError(f"layers must be one of {', '.join(NAMED)}, or indices from 0, got {self.layers!r}")
        if self.reduce not in ("mean", "max"):
            raise ValueError(f"reduce must be 'mean' or 'max', got {self.reduce!r}")
        if self.rows not in ("question", "suffix"):
            raise ValueError(f"rows must be 'question' or 'suffix', got {self.rows!r}")

    def layers_of(self, lm: LanguageModel) -> tuple[int, ...]:
        """Return the scored layers of a model, ascending.

        Raises:
            ValueError: if the model has no such layer with attention.
        """
        layers = lm.attention_layers
        count = len(layers)
        if self.layers == "all":
            return layers
        if self.layers == "upper":
            return layers[count // 2 :]
        if self.layers == "third_quarter":
            return layers[count // 2 : max(count * 3 // 4, count // 2 + 1)]
        if self.layers == "last":
            return layers[-1:]
        if missing := set(self.layers) - set(layers):
            without = ", which has no attention" if max(missing) < lm.n_layers else ""
            raise ValueError(f"the model has {lm.n_layers} layers, the probe asks for layer {max(missing)}{without}")
        return tuple(sorted(set(self.layers)))

    def depth(self, lm: LanguageModel) -> int:
        """Return the number of layers that the pass runs through."""
        return max(self.layers_of(lm)) + 1

    def scores(self, fused: FusedPrompt) -> Scores:
        """Return per layer the attention that each position gets, over all heads and probe rows.

        The buffer's rows of the probe are overwritten; fusion computes them again.
        """
        lm, asking = fused.lm, fused.probe_rows(suffix=self.rows == "suffix")
        wanted = self.layers_of(lm)
        length, depth = int(asking[-1]) + 1, self.depth(lm)
        visible_known = fused.known[:length].clone()
        visible_known[asking] = True
        # Copy asynchronously, so that the GPU queue never drains.
        rows, known = (to_device(tensor, lm.device) for tensor in (asking, visible_known))
        by_layer = torch.zeros(len(wanted), len(fused.prompt), dtype=torch.float32, device=lm.device)

        def observe(layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
            if layer in wanted:
                weights = attention_weights(query, key, rows, known, params, reduce=self.reduce)
                # Copied into memory of this stream: recorded passes compute on another stream.
                by_layer[wanted.index(layer), :length] = weights

        visible = self._visible(fused, visible_known, depth)
        plan = RowsPlan(rows, length, visible, observe, lm.sliding, asking)
        fused.runner.prefills.hidden(fused.ids[rows], plan, fused.loading_buffer, depth=depth)
        fused.row_layers += len(asking) * depth
        if self.normalized:
            candidates = candidate_positions(recomputable_chunks(fused), lm.device)
            by_layer /= by_layer[:, candidates].sum(1, keepdim=True).clamp_min(1e-12)
        return Scores(by_layer, wanted)

    def _visible(self, fused: FusedPrompt, known: Tensor, depth: int) -> Sequence[Tensor | None] | None:
        """Return the positions that the probe's rows may see in each layer; None for every position before them."""
        if self.anchor_ratio == 1 and bool(known.all()):
            return None
        outside = known.clone()
        if self.anchor_ratio < 1:
            for placed in fused.placed_chunks:
                outside[placed.span.start : placed.span.stop] = False
        always = outside.nonzero()[:, 0]
        if self.anchor_ratio in (0, 1):
            return [always] * depth
        anchors = [
            placed.chunk.anchors(self.anchor_ratio)[:depth].cpu() + placed.span.start for placed in fused.placed_chunks
        ]
        return torch.cat([always.expand(depth, -1), *anchors], dim=1).sort().values.unbind()
