"""Prefill chunks once into keys and values for the store."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.ingestion.token_ranking import (
    TokenRanking,
    instruction_ids,
    order_by_key_norm,
    order_by_position,
    query_ids,
)
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.placement import copy_chunk, rotate_buffer
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.prefill_base import Ranking


def prefill_chunk(lm: LanguageModel, ids: tuple[int, ...], *, prefix: ChunkKV | None = None) -> ChunkKV:
    """Compute the keys and values of one chunk; see `prefill_chunks`."""
    return prefill_chunks(lm, [ids], prefix=prefix)[0]


@torch.inference_mode()
def prefill_chunks(
    lm: LanguageModel,
    batch: Sequence[tuple[int, ...]],
    *,
    prefix: ChunkKV | Sequence[ChunkKV] | None = None,
    ranking: Ranking = "instruction",
) -> list[ChunkKV]:
    """Compute the keys and values of several chunks in one pass, and rank their tokens.

    Each chunk is a sequence of its own: prefix, chunk, query tokens that rank it (see `ingestion.token_ranking`), and
    padding. A token attends to nothing behind it, so query tokens and padding do not change a chunk's keys and values,
    except for the last bits, which depend on the shape of the pass.

    Args:
        lm: the model.
        batch: token ids of each chunk; similar lengths need less padding.
        prefix: stored keys and values in front of the chunks, from position 0: one for all chunks, or one for each
            chunk, all of the same length. None for no prefix.
        ranking: the ranking of tokens.

    Returns:
        The chunks in the same order, on the model's device.

    Raises:
        PromptTooLong: if prefix and the longest chunk exceed the context window.
        ValueError: if prefixes differ in length.
    """
    prefixes = [prefix] if isinstance(prefix, ChunkKV) else list(prefix or ())
    if len({chunk.n_tokens for chunk in prefixes}) > 1 or (len(prefixes) > 1 and len(prefixes) != len(batch)):
        raise ValueError(f"{len(batch)} chunks need one prefix, or one each of the same length")
    start = prefixes[0].n_tokens if prefixes else 0
    longest = max(len(ids) for ids in batch)
    limit = lm.context_window.tokens
    spare = limit - start - longest
    if start >= limit:
        raise PromptTooLong(
            f"the text before the passage has {start:,} tokens, the context window {limit:,}; shorten it"
        )
    if spare < 0:
        raise PromptTooLong(
            f"a passage of {longest:,} tokens behind {start:,} exceeds the context window of {limit:,}; "
            "split the document into smaller passages"
        )
    instruction = instruction_ids(lm.tokenizer)
    queries = [query_ids(ranking, instruction, ids)[:spare] for ids in batch]
    unpadded = [ids + query for ids, query in zip(batch, queries, strict=True)]
    width = max(map(len, unpadded))
    sequences = [ids + (0,) * (width - len(ids)) for ids in unpadded]
    buffer = lm.empty_buffer(start + width, batch=len(batch))
    for index, chunk in enumerate(prefixes):
        sequence = slice(None) if len(prefixes) == 1 else slice(index, index + 1)
        copy_chunk(buffer, 0, chunk, sequence, ropes=lm.ropes)
    attention = TokenRanking(lm.n_layers, start, list(map(len, batch)), list(map(len, queries)), lm.device)
    plan = RowsPlan.between(start, start + width, lm.device, lm.sliding, attention.observe)
    forward_hidden(lm, torch.tensor(sequences, device=lm.device), plan, buffer, depth=lm.n_layers)
    rotate_buffer(buffer, lm.ropes, start, start + longest, back=True)
    return [_cut(lm, buffer, index, start, len(ids), ranking, attention) for index, ids in enumerate(batch)]


def _cut(
    lm: LanguageModel, buffer: KVBuffer, index: int, start: int, tokens: int, ranking: Ranking, attention: TokenRanking
) -> ChunkKV:
    """Cut the chunk of one sequence out of a buffer."""
    keys = [layer[index, :, start : start + tokens] for layer in buffer.keys]
    values = [layer[index, :, start : start + tokens] for layer in buffer.values]
    if ranking == "knorm":
        order = order_by_key_norm(keys)
    elif ranking == "sinks":
        order = order_by_position(lm.n_layers, tokens)
    else:
        order = attention.order(index)
    return ChunkKV.of(keys, values, order, probe_layers=lm.critical_layers)
