"""Prefill one chunk, once, into the keys and values that are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.fuse.buffer import KVBuffer
from qcfuse_rag.fuse.forward import forward_hidden
from qcfuse_rag.fuse.place import copy_chunk, rotate_buffer
from qcfuse_rag.fuse.probe import default_critical_layers
from qcfuse_rag.fuse.rows import RowsPlan
from qcfuse_rag.ingest.anchors import rank_tokens
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.store.chunk import ChunkKV


@torch.inference_mode()
def prefill_chunk(lm: LanguageModel, ids: tuple[int, ...], *, prefix: ChunkKV | None = None) -> ChunkKV:
    """Compute a chunk's keys and values in one pass, alone in its batch.

    Alone, so that the stored bytes depend on the chunk and its prefix and on nothing that happened to be prefilled
    beside it.

    Args:
        lm: the model.
        ids: the chunk's tokens.
        prefix: stored keys and values of what stands in front, exact from position 0; None for nothing.

    Returns:
        The chunk, on the model's device.

    Raises:
        PromptTooLong: if prefix and chunk exceed the context window.
    """
    start = 0 if prefix is None else prefix.n_tokens
    stop = start + len(ids)
    if stop > lm.window.tokens:
        raise PromptTooLong(
            f"a passage of {len(ids):,} tokens behind {start:,} exceeds the context window of {lm.window.tokens:,}; "
            "split the document into smaller passages"
        )
    buffer = KVBuffer.allocate(lm.shapes, stop, dtype=lm.dtype, device=lm.device)
    if prefix is not None:
        copy_chunk(buffer, 0, prefix)
        rotate_buffer(buffer, lm.ropes, 0, start)
    rows = torch.arange(start, stop, device=lm.device)
    tokens = torch.tensor(ids, dtype=torch.int64, device=lm.device)
    forward_hidden(lm, tokens, RowsPlan.of(rows, lm.sliding), buffer, depth=lm.n_layers)
    rotate_buffer(buffer, lm.ropes, start, stop, back=True)
    keys, values = _cut(buffer.keys, start), _cut(buffer.values, start)
    ranking = rank_tokens(lm, keys, values, prefix)
    return ChunkKV.of(keys, values, ranking, probe_layers=default_critical_layers(lm.n_layers))


def _cut(layers: tuple[Tensor, ...], start: int) -> list[Tensor]:
    return [layer[0, :, start:].clone() for layer in layers]
