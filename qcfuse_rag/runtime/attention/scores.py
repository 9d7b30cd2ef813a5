"""How much attention a pass's rows pay to each key: the raw material of every query-aware method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse_rag.runtime.kernels.support import supports_kernels
from qcfuse_rag.runtime.reference_attention import plain_attention_weights


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
    if supports_kernels(query, key):
        from qcfuse_rag.runtime.kernels.context_score import context_scores

        return context_scores(query, key, rows, known, scaling=scaling, softcap=softcap, window=window, reduce=reduce)
    return plain_attention_weights(
        query, key, rows, known, scaling=scaling, softcap=softcap, window=window, reduce=reduce
    )
