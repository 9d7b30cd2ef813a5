"""Prefill a chunk behind its likely neighbours before it is stored: FusionRAG's preliminary cross-attention.

FusionRAG (arXiv 2601.12904): a first pass prefills every chunk behind the system prefix. A second pass prefills it
again, behind the system prefix and the first-pass caches of the most related chunks. The stored cache keeps its size,
and the neighbours are not used at question time. Enriched caches are made from first-pass caches only, never from other
enriched ones, so the result does not depend on the order of the work.

Chunks with prefixes of the same length are enriched together. Uncut prefixes rarely have the same length. So the last
neighbour is cut at its end, by at most a sixteenth of all neighbours; the cut does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qcfuse_rag.ingestion.prefill import prefill_chunks
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.chunk import ChunkKV

NEIGHBOURS = 10
"""The paper's number; the paper finds 5 nearly as good and 15 worse."""
GRAINS = 16


@dataclass(frozen=True, slots=True)
class NeighbourPrefix:
    """The prefix of an enriched chunk.

    Attributes:
        neighbours: number of neighbours in it, from the best.
        length: tokens of the system prefix and of these neighbours, the last one cut at its end.
    """

    neighbours: int
    length: int


def fit_neighbours(
    n_tokens: int, prefix_tokens: int, neighbour_tokens: Sequence[int], context_tokens: int
) -> NeighbourPrefix:
    """Choose how many neighbours stand in front of a chunk, and the length of its prefix.

    Args:
        n_tokens: tokens of the chunk and of the ranking instruction behind it.
        prefix_tokens: tokens of the system prefix.
        neighbour_tokens: tokens of each neighbour, most related first; the last ones are left out if they do not fit.
        context_tokens: the model's context window in tokens.
    """
    total, count = 0, 0
    for tokens in neighbour_tokens:
        if prefix_tokens + total + tokens + n_tokens > context_tokens:
            break
        total, count = total + tokens, count + 1
    grain = 1 << max(0, (total // GRAINS).bit_length() - 1)
    length = total - total % grain
    while count and sum(neighbour_tokens[: count - 1]) >= length:
        count -= 1  # nothing of the last neighbour is left
    return NeighbourPrefix(count, prefix_tokens + length)


def enrich_chunks(
    lm: LanguageModel, batch: Sequence[tuple[int, ...]], prefixes: Sequence[Sequence[tuple[str, ChunkKV]]], length: int
) -> list[ChunkKV]:
    """Prefill chunks, each behind the caches of its own neighbours.

    Args:
        lm: the model.
        batch: token ids of each chunk.
        prefixes: for each chunk the caches in front of it: the system prefix, if there is one, under the name "", then
            first-pass caches under their `hash_ids`, most related first.
        length: tokens in front of each chunk; a longer last neighbour is cut at its end.

    Returns:
        The chunks on the model's device; their `context` names their neighbours.

    Raises:
        PromptTooLong: if prefix and longest chunk exceed the context window.
    """
    joined = [join_chunks([chunk for _, chunk in prefix], length, lm.device) for prefix in prefixes] if length else None
    chunks = prefill_chunks(lm, batch, prefix=joined)
    return [
        replace(chunk, context=tuple(name for name, _ in prefix if name))
        for chunk, prefix in zip(chunks, prefixes, strict=True)
    ]


def join_chunks(chunks: Sequence[ChunkKV], length: int, device: torch.device) -> ChunkKV:
    """Join chunks end to end and return the first `length` tokens, on a device; unrotated keys need no change.

    The tokens are ranked in their order, because a prefix is never probed.
    """
    if len(chunks) == 1 and length == chunks[0].n_tokens:
        return chunks[0]
    keys, values = [], []
    for layer in range(chunks[0].n_layers):
        parts = [chunk.layer(layer) for chunk in chunks]
        keys.append(torch.cat([part[0].to(device) for part in parts], dim=1)[:, :length])
        values.append(torch.cat([part[1].to(device) for part in parts], dim=1)[:, :length])
    return ChunkKV.of(keys, values, torch.arange(length).expand(len(keys), -1))
