"""Prefill chunks, once, into the keys and values that are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.ingestion.token_ranking import (
    TokenRanking,
    asking_ids,
    instruction_ids,
    order_by_key_norm,
    order_by_position,
)
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.placement import copy_chunk, rotate_buffer
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.prefill_base import Ranking


def prefill_chunk(
    lm: LanguageModel, ids: tuple[int, ...], *, prefix: ChunkKV | None = None, ranking: Ranking = "instruction"
) -> ChunkKV:
    """Compute one chunk's keys and values; see `prefill_chunks`."""
    return prefill_chunks(lm, [ids], prefix=prefix, ranking=ranking)[0]


@torch.inference_mode()
def prefill_chunks(
    lm: LanguageModel,
    batch: Sequence[tuple[int, ...]],
    *,
    prefix: ChunkKV | Sequence[ChunkKV] | None = None,
    ranking: Ranking = "instruction",
) -> list[ChunkKV]:
    """Compute the keys and values of several chunks in one pass, and rank their tokens.

    Each chunk is a sequence of its own behind its prefix, followed by the words that rank it (see `ingestion.token_ranking`) and
    filled up at its end: a token sees nothing that comes after it, so none of this changes its keys and values, but
    for the last bits, which follow the shape of the pass.

    Args:
        lm: the model.
        batch: the chunks' tokens; the less their lengths differ, the less is computed in vain.
        prefix: stored keys and values of what stands in front, from position 0: the same for all chunks, or one for
            each, all of one length; None for nothing.
        ranking: how to rank tokens.

    Returns:
        The chunks in the same order, on the model's device.

    Raises:
        PromptTooLong: if prefix and the longest chunk exceed the context window.
        ValueError: if prefixes differ in length.
    """
    prefixes = [prefix] if isinstance(prefix, ChunkKV) else list(prefix or ())
    if len({one.n_tokens for one in prefixes}) > 1 or (len(prefixes) > 1 and len(prefixes) != len(batch)):
        raise ValueError(f"{len(batch)} chunks need one prefix, or one each of the same length")
    start = prefixes[0].n_tokens if prefixes else 0
    longest = max(len(ids) for ids in batch)
    room = lm.window.tokens - start - longest
    if start >= lm.window.tokens:
        raise PromptTooLong(
            f"the prompt's beginning alone has {start:,} tokens, the context window {lm.window.tokens:,}; shorten it"
        )
    if room < 0:
        raise PromptTooLong(
            f"a passage of {longest:,} tokens behind {start:,} exceeds the context window of {lm.window.tokens:,}; "
            "split the document into smaller passages"
        )
    instruction = instruction_ids(lm.tokenizer)
    asking = [asking_ids(ranking, instruction, ids)[:room] for ids in batch]
    width = max(len(ids) + len(ask) for ids, ask in zip(batch, asking, strict=True))
    sequences = [
        (*ids, *ask, *(0 for _ in range(width - len(ids) - len(ask)))) for ids, ask in zip(batch, asking, strict=True)
    ]
    buffer = KVBuffer.allocate(lm.shapes, start + width, dtype=lm.dtype, device=lm.device, batch=len(batch))
    for place, one in enumerate(prefixes):
        behind = slice(None) if len(prefixes) == 1 else slice(place, place + 1)
        copy_chunk(buffer, 0, one, behind, ropes=lm.ropes)
    watch = TokenRanking(lm.n_layers, start, [len(ids) for ids in batch], [len(ask) for ask in asking], lm.device)
    plan = RowsPlan.between(start, start + width, lm.device, lm.sliding, watch.observe)
    forward_hidden(lm, torch.tensor(sequences, device=lm.device), plan, buffer, depth=lm.n_layers)
    rotate_buffer(buffer, lm.ropes, start, start + longest, back=True)
    return [_cut(lm, buffer, index, start, len(ids), ranking, watch) for index, ids in enumerate(batch)]


def _cut(
    lm: LanguageModel, buffer: KVBuffer, index: int, start: int, tokens: int, ranking: Ranking, watch: TokenRanking
) -> ChunkKV:
    keys = [layer[index, :, start : start + tokens] for layer in buffer.keys]
    values = [layer[index, :, start : start + tokens] for layer in buffer.values]
    if ranking == "knorm":
        order = order_by_key_norm(keys)
    elif ranking == "sinks":
        order = order_by_position(lm.n_layers, tokens)
    else:
        order = watch.order(index)
    return ChunkKV.of(keys, values, order, probe_layers=lm.critical_layers)
