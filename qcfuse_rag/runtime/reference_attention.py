"""Attention step by step in float32: the reference for all fast paths, and the attention of unusual models."""

from __future__ import annotations

import torch
from torch import Tensor

from qcfuse_rag.runtime.rows import AttentionParams

MIN_ROWS = 8
"""Rows scored at a time, even if that takes more memory than a layer's keys and values; fewer make slow products."""


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attend step by step in float32, with a boolean mask (True where a row sees a key), an additive one or none.

    Shapes are `[1, Hq, R, D]`, `[1, Hkv, T, D]` and `[1, Hkv, T, Dv]`; the mask broadcasts to `[1, Hq, R, T]`. A window
    counts only by the mask. The result is `[1, Hq, R, Dv]` in the dtype of `query`.
    """
    scores = attention_scores(query, key, params.scaling, params.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if params.sinks is not None:
        sink_scores = params.sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink_scores], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    batch, heads, rows, keys = weights.shape
    grouped = weights.reshape(batch, value.shape[1], -1, keys) @ value.float()
    return grouped.reshape(batch, heads, rows, value.shape[-1]).to(query.dtype)


def attention_scores(query: Tensor, key: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Return `[1, Hq, R, T]` float32 scores before masking and softmax."""
    batch, heads, rows, dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, dim).float() * scaling
    scores = grouped @ key.float().transpose(-1, -2)
    if softcap is not None:  # in place, because scores are the largest tensor of a pass
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return scores.reshape(batch, heads, rows, key.shape[2])


def seen_keys(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return `[R, K]` bool: whether a row sees a key, by their positions and the sliding window in tokens, if any."""
    distance = rows[:, None] - keys[None, :]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return seen


def plain_attention_weights(
    query: Tensor, key: Tensor, rows: Tensor, known: Tensor, params: AttentionParams, *, reduce: str = "mean"
) -> Tensor:
    """Compute `attention.scores.attention_weights` in plain torch, some rows at a time; used without a GPU."""
    length = key.shape[2]
    positions = torch.arange(length, device=key.device)
    total = torch.zeros(length, dtype=torch.float32, device=key.device)
    # The scores, weights and masks of these rows take no more memory than the layer's keys and values.
    step = max(MIN_ROWS, 2 * key.nbytes // (3 * 4 * query.shape[1] * length))
    for start in range(0, query.shape[2], step):
        step_rows = rows[start : start + step]
        seen = seen_keys(step_rows, positions, params.window) & known[None, :]
        scores = attention_scores(query[:, :, start : start + step], key, params.scaling, params.softcap)
        first_masked = int(seen.all(0).long().argmin())  # every row sees all keys before this one
        scores[..., first_masked:].masked_fill_(~seen[:, first_masked:], float("-inf"))
        weights = scores.softmax(-1)[0]  # [Hq, r, T]
        if reduce == "max":
            total = torch.maximum(total, weights.amax((0, 1)))
        else:
            total += weights.sum((0, 1)) / (query.shape[1] * query.shape[2])
    return total
