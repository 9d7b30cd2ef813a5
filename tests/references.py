"""Slow references that use nothing but transformers' own forward, for the fast paths to be compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from qcfuse_rag import Base, LanguageModel, Prompt, Role
from qcfuse_rag.fuse.self_check import stock_attention

Table = list[tuple[Tensor, Tensor]]
"""Per layer keys and values, `[1, Hkv, T, D]`, rotated at their positions."""


@torch.inference_mode()
def plain_forward(lm: LanguageModel, ids: tuple[int, ...]) -> tuple[Tensor, Table]:
    """Run the model as transformers would: `[T, vocabulary]` logits and the cache."""
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    with stock_attention(lm):
        logits = lm.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0]
    return logits, [(layer.keys, layer.values) for layer in cache.layers]


@torch.inference_mode()
def greedy_continuation(lm: LanguageModel, ids: tuple[int, ...], count: int) -> list[int]:
    """Continue greedily, running the whole text afresh for every token."""
    text = list(ids)
    with stock_attention(lm):
        for _ in range(count):
            text.append(int(lm.model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


@torch.inference_mode()
def alone_at(lm: LanguageModel, ids: tuple[int, ...], start: int, before: tuple[int, ...] = ()) -> Table:
    """Compute a segment's keys and values behind `before`, at positions `start ...` of the prompt."""
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    first = start - len(before)
    positions = torch.arange(first, start + len(ids))[None]
    with stock_attention(lm):
        lm.model(input_ids=torch.tensor([before + ids]), position_ids=positions, past_key_values=cache, use_cache=True)
    return [(layer.keys[:, :, len(before) :], layer.values[:, :, len(before) :]) for layer in cache.layers]


def stored_table(lm: LanguageModel, prompt: Prompt, base: Base) -> Table:
    """Assemble every segment of a prompt as its base says, each by the model's own forward, at its place."""
    tables = []
    for span in prompt.spans:
        before = base.prefix(prompt.frame) if span.segment.role is Role.CHUNK else ()
        tables.append(alone_at(lm, span.segment.ids, span.start, before=before))
    return [
        (torch.cat([t[layer][0] for t in tables], dim=2), torch.cat([t[layer][1] for t in tables], dim=2))
        for layer in range(lm.n_layers)
    ]


@torch.inference_mode()
def sequential_fusion(lm: LanguageModel, ids: tuple[int, ...], rows: list[int], table: Table) -> tuple[Tensor, Table]:
    """Recompute rows one at a time in ascending order, each over what stands before it.

    A row sees only earlier positions, so when its turn comes they are final: one token at a time gives what one pass
    over all rows must give.

    Args:
        lm: the model.
        ids: the whole prompt.
        rows: positions to compute, ascending; the last token is one of them.
        table: keys and values of all positions; those at rows are ignored.

    Returns:
        `[vocabulary]` logits after the last row, and the completed table.
    """
    table = [(keys.clone(), values.clone()) for keys, values in table]
    logits = torch.empty(0)
    with stock_attention(lm):
        for row in rows:
            cache = Cache(layer_class_to_replicate=DynamicLayer)
            for layer, (keys, values) in enumerate(table):
                cache.update(keys[:, :, :row], values[:, :, :row], layer)
            out = lm.model(
                input_ids=torch.tensor([[ids[row]]]),
                position_ids=torch.tensor([[row]]),
                past_key_values=cache,
                use_cache=True,
            )
            logits = out.logits[0, -1]
            for (keys, values), layer in zip(table, cache.layers, strict=True):
                keys[:, :, row], values[:, :, row] = layer.keys[:, :, -1], layer.values[:, :, -1]
    return logits, table
