"""How much the chunks of a prompt look at each other: Cache-Craft's statistics (arXiv 2502.15734), from one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qcfuse_rag.fuse.attention import attention_scores

MAX_SCORE_BYTES = 256 << 20


class ContextAttention:
    """Watches a pass over all rows of a prompt, and sums the attention that chunks pay to each other.

    A weight is a row's share of its whole attention, the prompt's head included, mean over heads; what a learned sink
    takes off (gpt-oss) is left in. Scores are made a block of rows at a time.

    Args:
        n_layers: layers of the model.
        spans: `(start, stop)` of each chunk, one right behind the other, in a prompt computed from position 0.
        device: of the pass.

    Attributes:
        mass: `[n_layers, C, C]` float32, from the tokens of a chunk (first C) to those of one not behind it.
        tokens: `[T]` float32 for the positions from the first chunk's start: what each token pays to chunks before
            its own, mean over layers.
    """

    def __init__(self, n_layers: int, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._start, self._stop = spans[0][0], spans[-1][1]
        lengths = torch.tensor([stop - start for start, stop in spans], device=device)
        self._chunk = torch.arange(len(spans), device=device).repeat_interleave(lengths)  # of each position
        self._lengths = lengths
        self._n_layers = n_layers
        self.mass = torch.zeros(n_layers, len(spans), len(spans), device=device)
        self.tokens = torch.zeros(self._stop - self._start, device=device)

    def observe(
        self, layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None
    ) -> None:
        """Sum one layer's attention; an `Observer` of `fuse.rows`.

        Args:
            layer: the layer.
            query: `[1, Hq, T, D]` of all rows.
            key: `[1, Hkv, T, D]`.
            scaling: factor on scores.
            softcap: cap on scores, or None.
            window: sliding window in tokens, or None.
        """
        chunks = len(self._lengths)
        member = torch.nn.functional.one_hot(self._chunk, chunks).to(torch.float32)
        step = max(1, MAX_SCORE_BYTES // (4 * query.shape[1] * self._stop))
        for start in range(self._start, self._stop, step):
            stop = min(start + step, self._stop)
            distance = (
                torch.arange(start, stop, device=key.device)[:, None] - torch.arange(stop, device=key.device)[None, :]
            )
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            scores = attention_scores(query[:, :, start:stop], key[:, :, :stop], scaling, softcap)
            weights = scores.masked_fill_(~seen, float("-inf")).softmax(-1)[0].mean(0)  # [r, stop]
            first, last = start - self._start, stop - self._start
            paid = weights[:, self._start :] @ member[:last]  # [r, C]
            self.mass[layer] += member[first:last].T @ paid
            before = torch.arange(chunks, device=key.device)[None, :] < self._chunk[first:last, None]
            self.tokens[first:last] += (paid * before).sum(1) / self._n_layers

    def facts(self, index: int) -> dict[str, tuple[float, ...]]:
        """Return what is kept of a chunk's looks.

        Args:
            index: of the chunk, from 1: the first has no chunk before it.

        Returns:
            `cci`: Cache-Craft's cache context impact in [0.5, 1], how much of what the chunk looks at lies before it.
            `inter`: attention paid to each chunk before it, sums over its tokens, means over layers and heads.
        """
        inter, intra = self.mass[:, index, :index], self.mass[:, index, index]
        length = float(self._lengths[index])
        a = float((inter / (length * self._lengths[:index])).sum(1).mean())
        b = float(intra.mean()) / length**2
        impact = 1 / (1 + math.exp(-min(a / b, 700.0))) if b > 0 else 1.0
        return {"cci": (impact,), "inter": tuple(inter.mean(0).tolist())}
