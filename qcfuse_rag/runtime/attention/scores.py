"""The attention that each key receives from the rows of a pass: the basis of every query-aware method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse_rag.runtime.kernels.support import supports_kernels
from qcfuse_rag.runtime.reference_attention import plain_attention_weights
from qcfuse_rag.runtime.rows import AttentionParams


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The importance of every position of a prompt, by layer.

    Attributes:
        by_layer: `[n, T]` float32, higher is more important; undefined for positions that are not reused tokens.
        layers: the layer of each of the n rows, ascending.
    """

    by_layer: Tensor
    layers: tuple[int, ...]

    @property
    def mean(self) -> Tensor:
        """`[T]` float32, the mean over layers."""
        return self.by_layer.mean(0)


@torch.inference_mode()
def attention_weights(
    query: Tensor, key: Tensor, rows: Tensor, known: Tensor, params: AttentionParams, *, reduce: str = "mean"
) -> Tensor:
    """Return the attention that each key receives, pooled over rows and heads.

    The softmax runs over all keys that a row can see (system prefix, passages and the row's own segment), so a weight
    is a key's share of the row's whole attention.

    Args:
        query: `[1, Hq, R, D]`, rotated.
        key: `[1, Hkv, T, D]`, rotated; undefined at positions that are not `known`.
        rows: `[R]` int64 positions of the queries.
        known: `[T]` bool, positions that hold a key.
        params: how the layer computes scores.
        reduce: `mean` or `max` over rows and heads.

    Returns:
        `[T]` float32, on the device of `query`.
    """
    if supports_kernels(query, key):
        from qcfuse_rag.runtime.kernels.context_score import context_scores

        return context_scores(query, key, rows, known, params, reduce=reduce)
    return plain_attention_weights(query, key, rows, known, params, reduce=reduce)
