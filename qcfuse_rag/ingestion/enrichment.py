"""Let a chunk meet its likely neighbours before it is stored: FusionRAG's preliminary cross-attention.

FusionRAG (arXiv 2601.12904): in a first pass every chunk is prefilled behind the prompt's head; in a second one again,
behind the head and the first-pass caches of the chunks most related to it. What is kept has the same size, and the
neighbours themselves are not shown at question time. Enriched caches are made from first-pass caches only, never from
other enriched ones, so the result does not depend on the order of the work.

Chunks are enriched together if what stands before them has the same length. Left as they are, hardly two would, so the
last neighbour loses its end, a sixteenth of the whole at most: a chunk's own doing, whatever else is in its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qcfuse_rag.ingestion.prefill import prefill_chunks
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.chunk import ChunkKV

NEIGHBOURS = 10
"""The paper's; it finds 5 nearly as good and 15 worse."""
GRAINS = 16


@dataclass(frozen=True, slots=True)
class NeighbourPrefix:
    """What stands before an enriched chunk.

    Attributes:
        neighbours: how many of its neighbours, from the best.
        length: tokens of the head and of these neighbours, the last of them without its end.
    """

    neighbours: int
    length: int


def fit_neighbours(n_tokens: int, head_tokens: int, neighbour_tokens: Sequence[int], window: int) -> NeighbourPrefix:
    """Tell how many neighbours go before a chunk, and how long they are with the head.

    Args:
        n_tokens: of the chunk, and of what is computed along with it.
        head_tokens: of the prompt's head.
        neighbour_tokens: of each neighbour, most related first; the last that do not fit are left out.
        window: the model's context window in tokens.
    """
    total, met = 0, 0
    for tokens in neighbour_tokens:
        if head_tokens + total + tokens + n_tokens > window:
            break
        total, met = total + tokens, met + 1
    grain = 1 << max(0, (total // GRAINS).bit_length() - 1)
    length = total - total % grain
    while met and sum(neighbour_tokens[: met - 1]) >= length:
        met -= 1  # nothing is left of the last one
    return NeighbourPrefix(met, head_tokens + length)


def enrich_chunks(
    lm: LanguageModel, batch: Sequence[tuple[int, ...]], before: Sequence[Sequence[tuple[str, ChunkKV]]], length: int
) -> list[ChunkKV]:
    """Prefill chunks, each behind the caches of its own neighbours.

    Args:
        lm: the model.
        batch: the chunks' tokens.
        before: for each what stands before it: the prompt's head, if there is one, under the name "", then first-pass
            caches under their `hash_ids`, most related first.
        length: tokens that stand before a chunk; of a last neighbour that is longer, its beginning.

    Returns:
        The chunks, on the model's device; their `context` says behind which neighbours they were born.

    Raises:
        PromptTooLong: if that and the longest chunk exceed the context window.
    """
    prefixes = [join_chunks([chunk for _, chunk in own], length, lm.device) for own in before] if length else None
    born = prefill_chunks(lm, batch, prefix=prefixes)
    return [
        replace(chunk, context=tuple(name for name, _ in own if name)) for chunk, own in zip(born, before, strict=True)
    ]


def join_chunks(chunks: Sequence[ChunkKV], length: int, device: torch.device) -> ChunkKV:
    """Return the first `length` tokens of chunks laid end to end, on a device; unrotated keys need no change for that.

    The ranking of the whole is its order: what is only put in front of something is never probed.
    """
    if len(chunks) == 1 and length == chunks[0].n_tokens:
        return chunks[0]
    keys, values = [], []
    for layer in range(chunks[0].n_layers):
        parts = [chunk.layer(layer) for chunk in chunks]
        keys.append(torch.cat([part[0].to(device) for part in parts], dim=1)[:, :length])
        values.append(torch.cat([part[1].to(device) for part in parts], dim=1)[:, :length])
    return ChunkKV.of(keys, values, torch.arange(length).expand(len(keys), -1))
