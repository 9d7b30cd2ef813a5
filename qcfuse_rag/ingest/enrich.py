"""Let a chunk meet its likely neighbours before it is stored: FusionRAG's preliminary cross-attention.

FusionRAG (arXiv 2601.12904): in a first pass every chunk is prefilled behind the prompt's head; in a second one again,
behind the head and the first-pass caches of the chunks most related to it. What is kept has the same size, and the
neighbours themselves are not shown at question time. Enriched caches are made from first-pass caches only, never from
other enriched ones, so the result does not depend on the order of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qcfuse_rag.ingest.prefill import prefill_chunk
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.store.chunk import ChunkKV

NEIGHBOURS = 10
"""The paper's; it finds 5 nearly as good and 15 worse."""


def enrich_chunk(
    lm: LanguageModel, ids: tuple[int, ...], *, head: ChunkKV | None, neighbours: Sequence[tuple[str, ChunkKV]]
) -> ChunkKV:
    """Prefill a chunk behind the caches of its neighbours.

    Args:
        lm: the model.
        ids: the chunk's tokens.
        head: exact keys and values of the prompt's head; None if it has none.
        neighbours: `hash_ids` and first-pass caches, most related first; the last that do not fit the context window
            are left out.

    Returns:
        The chunk, on the model's device; its `context` says behind which neighbours it was born.

    Raises:
        PromptTooLong: if head and chunk alone exceed the context window.
    """
    before = [] if head is None else [head]
    met: list[str] = []
    length = len(ids) + sum(chunk.n_tokens for chunk in before)
    for name, chunk in neighbours:
        if length + chunk.n_tokens > lm.window.tokens:
            break
        before.append(chunk)
        met.append(name)
        length += chunk.n_tokens
    born = prefill_chunk(lm, ids, prefix=join_chunks(before) if before else None)
    return replace(born, context=tuple(met))


def join_chunks(chunks: Sequence[ChunkKV]) -> ChunkKV:
    """Return chunks as one, end to end; unrotated keys need no change for that.

    The ranking of the whole is its order: what is only put in front of something is never probed.
    """
    if len(chunks) == 1:
        return chunks[0]
    keys, values = [], []
    for layer in range(chunks[0].n_layers):
        parts = [chunk.layer(layer) for chunk in chunks]
        keys.append(torch.cat([part[0] for part in parts], dim=1))
        values.append(torch.cat([part[1] for part in parts], dim=1))
    total = keys[0].shape[1]
    return ChunkKV.of(keys, values, torch.arange(total).expand(len(keys), -1))
