"""Capture: compute a prompt's passages exactly in one pass, and cut out each passage's keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.ingestion.chunk_attention import ContextAttention
from qcfuse_rag.ingestion.token_ranking import TokenRanking, instruction_ids
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.placement import rotate_buffer
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import hash_ids


@torch.inference_mode()
def capture_chunks(lm: LanguageModel, prefix_ids: tuple[int, ...], chunks: Sequence[tuple[int, ...]]) -> list[ChunkKV]:
    """Compute the system prefix and chunks in one exact pass; return the chunks from the second on.

    Each result has its `context`, the facts `cci` and `inter` and the block `inter`, see `ingestion.chunk_attention`.
    Tokens are ranked as in `ingestion.prefill`, by an instruction behind the chunk in the same context.

    Args:
        lm: the model.
        prefix_ids: token ids of the system prefix.
        chunks: token ids of the chunks, in order, none empty. The framed base stores the first one.

    Returns:
        All chunks but the first, on the model's device, keys unrotated.

    Raises:
        PromptTooLong: if system prefix and chunks exceed the context window.
    """
    ids = [token for part in (prefix_ids, *chunks) for token in part]
    limit = lm.context_window.tokens
    if len(ids) > limit:
        raise PromptTooLong(
            f"{len(ids):,} tokens of system prefix and passages exceed the context window of {limit:,}; "
            "capture fewer passages at once"
        )
    if len(chunks) < 2:
        return []
    spans, start = [], len(prefix_ids)
    for chunk in chunks:
        spans.append((start, start + len(chunk)))
        start += len(chunk)
    instruction = instruction_ids(lm.tokenizer)
    length = min(len(ids) + len(instruction), limit)
    buffer = lm.empty_buffer(length)
    attention = ContextAttention(lm.n_layers, spans, lm.device)
    plan = RowsPlan.between(0, len(ids), lm.device, lm.sliding, attention.observe)
    forward_hidden(lm, torch.tensor(ids, device=lm.device), plan, buffer, depth=lm.n_layers)

    context, captures = [hash_ids(chunk) for chunk in chunks], []
    for index in reversed(range(1, len(chunks))):  # the instruction overwrites what follows a chunk
        start, stop = spans[index]
        order = _ranked(lm, buffer, start, stop, instruction[: length - stop])
        rotate_buffer(buffer, lm.ropes, start, stop, back=True)
        tokens = slice(start - len(prefix_ids), stop - len(prefix_ids))
        captures.append(
            ChunkKV.of(
                [keys[0, :, start:stop].clone() for keys in buffer.keys],
                [values[0, :, start:stop].clone() for values in buffer.values],
                order,
                probe_layers=lm.critical_layers,
                context=tuple(context[:index]),
                facts=attention.facts(index),
                extras={"inter": attention.tokens[tokens].clone()},
            )
        )
    return captures[::-1]


def _ranked(lm: LanguageModel, buffer: KVBuffer, start: int, stop: int, instruction: tuple[int, ...]) -> Tensor:
    """Compute the instruction behind a chunk, overwriting the buffer; return the ranking `[n_layers, n_tokens]`."""
    ranking = TokenRanking(lm.n_layers, start, [stop - start], [len(instruction)], lm.device)

    def observe(layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        # The ranking expects rows from the chunk's first token on, but does not read the rows of the chunk itself.
        padded = functional.pad(query, (0, 0, stop - start, 0))
        ranking.observe(layer, padded, key, params)

    if instruction:
        plan = RowsPlan.between(stop, stop + len(instruction), lm.device, lm.sliding, observe)
        forward_hidden(lm, torch.tensor(instruction, device=lm.device), plan, buffer, depth=lm.n_layers)
    return ranking.order(0)
