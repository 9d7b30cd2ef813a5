"""Probes: run the question over the stored caches and see which tokens it looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qcfuse_rag.fuse.assembly import Assembly
from qcfuse_rag.fuse.forward import forward_hidden
from qcfuse_rag.fuse.rows import RowsPlan
from qcfuse_rag.fuse.score import attention_weights
from qcfuse_rag.model.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class QuestionProbe:
    """The question's rows through the first layers, their attention to every reused token as its score.

    Attributes:
        layers: whose attention counts: `critical` (those of the model, see `LanguageModel.critical_layers`), `all`, or
            indices. Scores are averaged over them; the pass stops after the last.
        anchor_ratio: the share of each chunk's tokens the question sees on its way, by importance; 1 is all of them.
            The scores are over all tokens either way.
    """

    layers: Literal["critical", "all"] | tuple[int, ...] = "critical"
    anchor_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.anchor_ratio <= 1:
            raise ValueError(f"anchor_ratio must be in (0, 1], got {self.anchor_ratio}")
        if not isinstance(self.layers, str) and (not self.layers or min(self.layers) < 0):
            raise ValueError(f"layers must be 'critical', 'all' or indices from 0, got {self.layers!r}")

    def layers_of(self, lm: LanguageModel) -> tuple[int, ...]:
        """Return the scored layers of a model.

        Raises:
            ValueError: if the model has no such layer.
        """
        if self.layers == "critical":
            return lm.critical_layers
        if self.layers == "all":
            return tuple(range(lm.n_layers))
        if max(self.layers) >= lm.n_layers:
            raise ValueError(f"the model has {lm.n_layers} layers, the probe asks for layer {max(self.layers)}")
        return tuple(sorted(set(self.layers)))

    def scores(self, assembly: Assembly) -> Tensor:
        """Score every position of the prompt.

        Args:
            assembly: the prompt with its stored chunks placed. The buffer's rows of the probe are overwritten; fusion
                computes them again.

        Returns:
            `[T]` float32, the mean over layers, heads and probe rows of the attention each position gets.
        """
        lm, rows = assembly.lm, assembly.probe_rows()
        wanted = self.layers_of(lm)
        length, depth = int(rows[-1]) + 1, max(wanted) + 1
        known = assembly.known[:length].clone()
        known[rows] = True
        total = torch.zeros(len(assembly.prompt), dtype=torch.float32, device=lm.device)

        def observe(
            layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None
        ) -> None:
            if layer in wanted:
                total[:length] += attention_weights(
                    query, key, rows, known, scaling=scaling, softcap=softcap, window=window
                )

        visible = self._visible(assembly, rows, known, depth)
        plan = RowsPlan(rows, length, visible=visible, observe=observe, windows=lm.sliding)
        forward_hidden(lm, assembly.ids[rows], plan, assembly.buffer, depth=depth)
        return total / len(wanted)

    def _visible(self, assembly: Assembly, rows: Tensor, known: Tensor, depth: int) -> Sequence[Tensor | None] | None:
        """Return what the probe's rows may see in each layer; None where that is every position before them."""
        if self.anchor_ratio == 1:
            return None if bool(known.all()) else [known.nonzero()[:, 0]] * depth
        outside = known.clone()
        for placed in assembly.placed_chunks:
            outside[placed.span.start : placed.span.stop] = False
        always = outside.nonzero()[:, 0]
        anchors = [
            [
                placed.chunk.anchors(layer, self.anchor_ratio).to(rows.device) + placed.span.start
                for layer in range(depth)
            ]
            for placed in assembly.placed_chunks
        ]
        return [torch.cat([always, *(chunk[layer] for chunk in anchors)]).sort().values for layer in range(depth)]
