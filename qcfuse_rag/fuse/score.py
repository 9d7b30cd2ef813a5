"""How much attention a pass's rows pay to each key: the raw material of every query-aware method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse_rag.fuse.attention import attention_scores
from qcfuse_rag.fuse.kernels.support import kernels_take

LEAST_ROWS = 8
"""Rows scored at a time even if they take more than a layer's keys and values; fewer make slow products."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How important every position of a prompt is.

    Attributes:
        by_layer: `[n, T]` float32, higher is more important; positions that are not reused tokens mean nothing.
        layers: the layer of each row, ascending.
    """

    by_layer: Tensor
    layers: tuple[int, ...]

    @property
    def mean(self) -> Tensor:
        """`[T]` float32, the mean over layers."""
        return self.by_layer.mean(0)


@torch.inference_mode()
def attention_weights(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    known: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    reduce: str = "mean",
) -> Tensor:
    """Return the attention each key gets, pooled over rows and heads.

    The softmax runs over everything a row can see (head, passages and its own segment), so a weight says what share of
    the row's whole attention a key got.

    Args:
        query: `[1, Hq, R, D]`, rotated.
        key: `[1, Hkv, T, D]`, rotated; positions that are not `known` may hold anything.
        rows: `[R]` int64 positions of the queries.
        known: `[T]` bool, positions that hold a key.
        scaling: the layer's factor on scores.
        softcap: its cap on scores, or None.
        window: its sliding window in tokens, or None.
        reduce: `mean` or `max` over rows and heads.

    Returns:
        `[T]` float32, on the device of `query`.
    """
    if kernels_take(query, key):
        from qcfuse_rag.fuse.kernels.context_score import context_scores

        return context_scores(query, key, rows, known, scaling=scaling, softcap=softcap, window=window, reduce=reduce)
    return plain_attention_weights(
        query, key, rows, known, scaling=scaling, softcap=softcap, window=window, reduce=reduce
    )


def plain_attention_weights(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    known: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    reduce: str = "mean",
) -> Tensor:
    """Return the same in plain torch, a part of the rows at a time: the way without a GPU, and the reference of it."""
    length = key.shape[2]
    positions = torch.arange(length, device=key.device)
    total = torch.zeros(length, dtype=torch.float32, device=key.device)
    # Scores, weights and masks of some rows: no more than the layer's keys and values themselves.
    step = max(LEAST_ROWS, 2 * key.nbytes // (3 * 4 * query.shape[1] * length))
    for start in range(0, query.shape[2], step):
        part = rows[start : start + step]
        distance = part[:, None] - positions[None, :]
        seen = (distance >= 0) & known[None, :]
        if window is not None:
            seen &= distance < window
        scores = attention_scores(query[:, :, start : start + step], key, scaling, softcap)
        hidden = int(seen.all(0).long().argmin())  # where keys begin that not every row sees: the question's own
        scores[..., hidden:].masked_fill_(~seen[:, hidden:], float("-inf"))
        weights = scores.softmax(-1)[0]  # [Hq, r, T]
        if reduce == "max":
            total = torch.maximum(total, weights.amax((0, 1)))
        else:
            total += weights.sum((0, 1)) / (query.shape[1] * query.shape[2])
    return total
