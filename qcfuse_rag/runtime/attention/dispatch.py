"""The attention function that transformers models call: sparse rows against the request's keys and values.

Registered with transformers under the name `qcfuse`. The plan of a pass arrives through the forward's keyword
arguments, so nothing is kept between calls and requests cannot meet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.runtime.attention.cpu_blocks import attend_in_blocks, attention_blocks_of, supports_cpu_blocks
from qcfuse_rag.runtime.attention.dense import causal_attention
from qcfuse_rag.runtime.attention.row_blocks import ROWS_PER_BLOCK, RowBlock, blocks_of
from qcfuse_rag.runtime.kernels.support import supports_kernels
from qcfuse_rag.runtime.reference_attention import explicit_attention
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.step_plan import StepPlan
from qcfuse_rag.runtime.table_plan import TablePlan

NAME = "qcfuse"

UNKNOWN = -1
"""Stands for a sliding window that the model's code does not mention."""

MEANINGFUL = ("position_bias", "indices", "block_indices")
"""Keyword arguments of other models' attention that change its result in ways this function does not compute."""


def register() -> None:
    """Make `attn_implementation="qcfuse"` known to transformers; harmless to repeat."""
    AttentionInterface.register(NAME, rows_attention)
    # Without a mask function of its own, transformers would hand out no mask and compute wrong results silently.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    fusion: RowsPlan | StepPlan | TablePlan | None = None,
    sliding_window: int | None = UNKNOWN,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with the rows of a plan; without one, do what transformers' own attention does.

    Args:
        module: the calling attention layer.
        query: `[1, Hq, R, D]`, rotated.
        key: `[1, Hkv, length, D]`, rotated, every position of the prompt so far.
        value: `[1, Hkv, length, Dv]`.
        attention_mask: unused with a plan, which knows better.
        scaling: factor on the scores; `D ** -0.5` if None.
        fusion: the plan of a pass, or of rows of several requests: queries `[B, Hq, R, D]`, keys in their buffers.
        sliding_window: this layer's window in tokens or None; models that do not pass it leave it to the plan.
        softcap: cap on scores through tanh (Gemma 2).
        s_aux: `[Hq]` sink logits that take part in the softmax only (gpt-oss).
        **kwargs: whatever else the model passes on.

    Returns:
        `[1, R, Hq, Dv]`, and None for the weights.

    Raises:
        UnsupportedModel: if the model asks for something that is not computed here.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if fusion is None:
        if attention_mask is not None and attention_mask.shape[-2:] == (1, 1) and key.shape[2] > 1:
            raise UnsupportedModel(
                f"the model's layers do not hand {type(module).__name__} what they are called with, so it cannot be "
                "told which keys a row sees"
            )
        if softcap is None and s_aux is None:
            out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
            return out, None
        mask = _causal(query, key) if attention_mask is None else attention_mask[..., : key.shape[2]]
        return explicit_attention(query, key, value, mask, scaling, softcap, s_aux).transpose(1, 2).contiguous(), None

    asked = [name for name in MEANINGFUL if kwargs.get(name) is not None]
    if asked:
        raise UnsupportedModel(f"{type(module).__name__} attends by {', '.join(asked)}, which is not computed here")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    window = _window_of(fusion, layer) if sliding_window == UNKNOWN else sliding_window
    if isinstance(fusion, StepPlan):
        return _step_attention(query, fusion, layer, window, scaling, softcap, s_aux), None
    if fusion.observe is not None:
        fusion.observe(layer, query, key, scaling, softcap, window)
    if isinstance(fusion, TablePlan):
        from qcfuse_rag.runtime.kernels.paged_attention import table_attention

        return table_attention(
            query, fusion.table, layer, fusion.rows, scaling=scaling, softcap=softcap, window=window, sinks=s_aux
        ), None
    visible = fusion.visible_at(layer)
    if visible is not None:
        key, value = key.index_select(2, visible), value.index_select(2, visible)
    plain = softcap is None and s_aux is None
    fewer = len(fusion.rows) < fusion.length
    if visible is None and fewer and supports_kernels(query, value):
        from qcfuse_rag.runtime.kernels.sparse_attention import sparse_attention

        return sparse_attention(
            query, key, value, fusion.rows, scaling=scaling, softcap=softcap, window=window, sinks=s_aux
        ), None
    if plain and fewer and (window is None or window >= fusion.length) and supports_cpu_blocks(query, key, value):
        return attend_in_blocks(query, key, value, attention_blocks_of(fusion, layer), scaling), None
    outputs = []
    for block in blocks_of(fusion, layer, window):
        q = query[:, :, block.start : block.stop]
        k, v = key[:, :, block.first_key : block.last_key], value[:, :, block.first_key : block.last_key]
        if plain:
            outputs.append(_fast_attention(q, k, v, block, scaling))
        else:
            outputs += _explicit_block(q, k, v, block, scaling, softcap, s_aux)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return out.transpose(1, 2).contiguous(), None  # some models view what is returned


def _window_of(plan: RowsPlan | StepPlan | TablePlan, layer: int) -> int | None:
    return None if plan.windows is None else plan.windows[layer]


def _step_attention(
    query: Tensor,
    plan: StepPlan,
    layer: int,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with one row of each request, to the keys in its own buffer; return `[B, 1, Hq, Dv]`."""
    outputs = []
    for index, (buffer, position) in enumerate(zip(plan.buffers, plan.positions, strict=True)):
        last = position + 1
        first = 0 if window is None else max(0, last - window)
        own = query[index : index + 1]
        key, value = (held[layer][:, :, first:last] for held in (buffer.keys, buffer.values))
        if softcap is None and sinks is None:
            block = RowBlock(0, 1, first, last, mask=None, causal=False)
            outputs.append(_fast_attention(own, key, value, block, scaling).transpose(1, 2))
        else:
            outputs.append(explicit_attention(own, key, value, None, scaling, softcap, sinks).transpose(1, 2))
    return torch.cat(outputs).contiguous()


def _fast_attention(query: Tensor, key: Tensor, value: Tensor, block: RowBlock, scaling: float) -> Tensor:
    """Run torch's fused attention on one block, without repeating keys over the heads of a group."""
    if block.causal:
        return causal_attention(query, key, value, scaling)
    batch, heads, rows, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    if block.mask is None:  # a row that sees every key: the query heads of a group become its rows, and share a reading
        folded = query.reshape(batch, kv_heads, -1, dim)
        out = functional.scaled_dot_product_attention(folded, key, value, scale=scaling)
        return out.reshape(batch, heads, rows, value.shape[-1])
    groups = heads // kv_heads
    # Key heads take the place of sequences, and keys are the same for the heads of a group without being repeated:
    # fused kernels take no mask together with grouping.
    grouped_query = query.reshape(batch * kv_heads, groups, rows, dim)
    shared_key, shared_value = (
        one.reshape(batch * kv_heads, 1, keys, one.shape[3]).expand(-1, groups, -1, -1) for one in (key, value)
    )
    mask = block.additive(query.dtype)
    out = functional.scaled_dot_product_attention(
        grouped_query, shared_key, shared_value, attn_mask=mask, scale=scaling
    )
    return out.reshape(batch, heads, rows, value.shape[-1])


def _explicit_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: RowBlock,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> list[Tensor]:
    """Run the slow path on one block, a part of full prefill's rows at a time to bound its memory."""
    if not block.causal:
        return [explicit_attention(query, key, value, block.mask, scaling, softcap, sinks)]
    outputs = []
    for start in range(0, query.shape[2], ROWS_PER_BLOCK):
        part = query[:, :, start : start + ROWS_PER_BLOCK]
        stop = start + part.shape[2]
        k, v = key[:, :, :stop], value[:, :, :stop]
        outputs.append(explicit_attention(part, k, v, _causal(part, k), scaling, softcap, sinks))
    return outputs


def _causal(query: Tensor, key: Tensor) -> Tensor:
    rows, keys = query.shape[2], key.shape[2]
    return torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
