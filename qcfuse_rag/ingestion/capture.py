"""Capture: compute a prompt's passages exactly, once, and cut out each as it was born behind those before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from qcfuse_rag.errors import PromptTooLong
from qcfuse_rag.ingestion.chunk_attention import ContextAttention
from qcfuse_rag.ingestion.token_ranking import TokenRanking, instruction_ids
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.placement import rotate_buffer
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import hash_ids


def capture(lm: LanguageModel, prompt: Prompt) -> list[ChunkKV]:
    """Return every passage of a prompt but the first, born behind the prompt's fixed head and the passages before it.

    Of the prompt, head and passages are computed and nothing else: neither question nor conversation leaves a trace.

    Raises:
        PromptTooLong: if head and passages exceed the context window.
    """
    return capture_chunks(lm, prompt.prefix_ids, [span.segment.stored_ids for span in prompt.chunks])


@torch.inference_mode()
def capture_chunks(lm: LanguageModel, prefix_ids: tuple[int, ...], chunks: Sequence[tuple[int, ...]]) -> list[ChunkKV]:
    """Compute a head and the chunks behind it in one exact pass, and cut out the chunks from the second on.

    What each chunk knows of its birth: its `context`, the facts `cci` and `inter` and the block `inter`, see
    `ingestion.chunk_attention`. Its tokens are ranked as `ingestion.prefill` does, by an instruction that sees what it saw.

    Args:
        lm: the model.
        prefix_ids: token ids of the prompt's fixed head.
        chunks: token ids of the chunks, in order, none empty. The first is what the framed base stores anyway.

    Returns:
        One chunk less than given, on the model's device, keys unrotated.

    Raises:
        PromptTooLong: if all of it exceeds the context window.
    """
    ids = [token for part in (prefix_ids, *chunks) for token in part]
    if len(ids) > lm.window.tokens:
        raise PromptTooLong(
            f"{len(ids):,} tokens of head and passages exceed the context window of {lm.window.tokens:,}; capture "
            "fewer passages at once"
        )
    if len(chunks) < 2:
        return []
    spans, start = [], len(prefix_ids)
    for chunk in chunks:
        spans.append((start, start + len(chunk)))
        start += len(chunk)
    instruction = instruction_ids(lm.tokenizer)
    room = min(len(ids) + len(instruction), lm.window.tokens)
    buffer = KVBuffer.allocate(lm.shapes, room, dtype=lm.dtype, device=lm.device)
    watch = ContextAttention(lm.n_layers, spans, lm.device)
    plan = RowsPlan.between(0, len(ids), lm.device, lm.sliding, watch.observe)
    forward_hidden(lm, torch.tensor(ids, device=lm.device), plan, buffer, depth=lm.n_layers)

    context, born = [hash_ids(chunk) for chunk in chunks], []
    for index in reversed(range(1, len(chunks))):  # what is behind a chunk is cut out before its instruction gets there
        first, last = spans[index]
        order = _ranked(lm, buffer, first, last, instruction[: room - last])
        rotate_buffer(buffer, lm.ropes, first, last, back=True)
        own = slice(first - len(prefix_ids), last - len(prefix_ids))
        born.append(
            ChunkKV.of(
                [keys[0, :, first:last].clone() for keys in buffer.keys],
                [values[0, :, first:last].clone() for values in buffer.values],
                order,
                probe_layers=lm.critical_layers,
                context=tuple(context[:index]),
                facts=watch.facts(index),
                extras={"inter": watch.tokens[own].clone()},
            )
        )
    return born[::-1]


def _ranked(lm: LanguageModel, buffer: KVBuffer, first: int, last: int, instruction: tuple[int, ...]) -> Tensor:
    """Put the instruction behind a chunk, over what stands there, and return `[n_layers, n_tokens]` by importance."""
    ranking = TokenRanking(lm.n_layers, first, [last - first], [len(instruction)], lm.device)

    def observe(
        layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None
    ) -> None:
        # The ranking counts rows from the chunk's first token on; it does not look at those of the chunk itself.
        whole = functional.pad(query, (0, 0, last - first, 0))
        ranking.observe(layer, whole, key, scaling, softcap, window)

    if instruction:
        stop = last + len(instruction)
        plan = RowsPlan.between(last, stop, lm.device, lm.sliding, observe)
        forward_hidden(lm, torch.tensor(instruction, device=lm.device), plan, buffer, depth=lm.n_layers)
    return ranking.order(0)
