"""Rank a chunk's tokens by importance before any question is known.

The best of them, the anchors, stand in for the chunk when a question probes it. The ranking is the light form of KVzip
(Kim et al., arXiv 2505.23416) that QCFuse uses: an instruction to repeat the text looks at the chunk, and a token is as
important as the strongest look it gets from any word of the instruction, in any head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.forward import forward_hidden
from qcfuse_rag.fuse.place import rotate_buffer
from qcfuse_rag.fuse.rows import RowsPlan
from qcfuse_rag.fuse.score import attention_weights
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.store.chunk import ChunkKV

INSTRUCTION = "\n\nRepeat the previous context exactly."
SINKS = 4


@torch.inference_mode()
def rank_tokens(lm: LanguageModel, keys: list[Tensor], values: list[Tensor], prefix: ChunkKV | None) -> Tensor:
    """Order a chunk's tokens by importance, layer by layer.

    The instruction sees the first four tokens of what the chunk was prefilled behind, the chunk, and itself. The
    chunk's own first four tokens lead every ranking: they are where attention gathers when the chunk is read alone.

    Args:
        lm: the model.
        keys: per layer `[Hkv, n, D]`, unrotated.
        values: per layer `[Hkv, n, Dv]`.
        prefix: what the chunk was prefilled behind, or None.

    Returns:
        `[layers, n]` int32 token indices, most important first.
    """
    instruction = lm.tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    n_sinks, n = (0 if prefix is None else min(SINKS, prefix.n_tokens)), keys[0].shape[1]
    asking = n_sinks + n
    buffer = KVBuffer.allocate(lm.shapes, asking + len(instruction), dtype=lm.dtype, device=lm.device)
    for layer in range(lm.n_layers):
        if prefix is not None:
            first_keys, first_values = prefix.layer(layer)
            buffer.keys[layer][0, :, :n_sinks] = first_keys[:, :n_sinks].to(lm.device)
            buffer.values[layer][0, :, :n_sinks] = first_values[:, :n_sinks].to(lm.device)
        buffer.keys[layer][0, :, n_sinks:asking] = keys[layer]
        buffer.values[layer][0, :, n_sinks:asking] = values[layer]
    rotate_buffer(buffer, lm.ropes, 0, asking)
    rows = torch.arange(asking, buffer.capacity, device=lm.device)
    known = torch.ones(buffer.capacity, dtype=torch.bool, device=lm.device)
    importance = torch.zeros(lm.n_layers, n, device=lm.device)

    def observe(
        layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None
    ) -> None:
        weights = attention_weights(
            query, key, rows, known, scaling=scaling, softcap=softcap, window=window, reduce="max"
        )
        importance[layer] = weights[n_sinks:asking]

    plan = RowsPlan(rows, buffer.capacity, observe=observe, windows=lm.sliding)
    forward_hidden(lm, torch.tensor(instruction, device=lm.device), plan, buffer, depth=lm.n_layers)
    importance[:, :SINKS] = torch.inf
    return importance.argsort(dim=1, descending=True, stable=True).to(torch.int32)
