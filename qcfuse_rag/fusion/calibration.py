"""Calibrate readers: correct how much attention the rows behind the passages pay to fused passages.

Rows that read fused caches pay the passages more or less attention than rows that read full prefill's. In many heads
the difference hardly depends on the question. A bias for each head corrects it: a number that is added to the head's
scores on the keys from the first passage that is not exact to the last. Attention over these keys and over the rest is
joined by the logarithms of their sums, so the correction costs next to nothing. Adaptive parallel encoding (APE, arXiv
2502.05431) scales this sum by one factor for all heads; here each head has its own, fitted to model and library by
`verification.calibration`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.runtime.rows import ReaderBias
from qcfuse_rag.store.key import hash_ids


@dataclass(frozen=True, slots=True)
class Calibration:
    """The biases of one method at one ratio, on one model and wording.

    Attributes:
        biases: for each layer the bias of each query head, added to attention scores.
        prefix: `hash_ids` of the system prefix that they were fitted with; other prompts are not corrected.
    """

    biases: tuple[tuple[float, ...], ...]
    prefix: str

    def reader_bias(self, fused: FusedPrompt, candidates: list[PlacedChunk], selected: int) -> ReaderBias | None:
        """Return the bias of a prompt's readers.

        Args:
            fused: the prompt with its stored chunks placed.
            candidates: placed chunks that are not exact.
            selected: number of their tokens that are recomputed.

        Returns:
            None if there is nothing to correct: everything is exact or recomputed, the wording is another, or the model
            has other layers.
        """
        inexact = [(placed.span.start, placed.span.stop) for placed in candidates] + fused.inexact_prefix_passages
        left = sum(stop - start for start, stop in inexact) - selected
        if left <= 0 or hash_ids(fused.prompt.prefix_ids) != self.prefix or len(self.biases) != fused.lm.n_layers:
            return None
        first_row = max(span.stop for span in fused.prompt.chunks)
        start, stop = min(start for start, _ in inexact), max(stop for _, stop in inexact)
        return ReaderBias(torch.tensor(self.biases, device=fused.lm.device), first_row, start, stop)
