"""Keep the keys and values of an answer that will be a passage of a later prompt (RelayCaching, arXiv 2603.13289).

Decoding has computed them; what is stored is exactly that, and only the answer's own tokens: nothing of the prompt or
the question. They do depend on both, as those of an answer must, so keep them where the conversation may be kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.ingestion.provenance_ledger import ProvenanceLedger
from qcfuse_rag.ingestion.token_ranking import order_by_key_norm
from qcfuse_rag.models.rope import angles, rotate
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_hidden
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import ChunkKey, hash_ids
from qcfuse_rag.store.prefill_base import Base

GENERATED = Base("generated", after_prefix=True, ranking="knorm")
"""Behind a whole prompt that began with the head. Never exact anywhere else, and nothing can be warmed under it."""

MERGED = 2
"""Tokens at the end of an answer that may come out otherwise when it stands in a passage: `.` and a blank line are one
token in many vocabularies."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of an answer that was to be kept.

    Attributes:
        key: its entry, or None if it was not stored.
        tokens: tokens stored.
        computed: those of them that decoding had not computed: its last, and what the template writes behind a passage.
        reason: why it was not stored, or None.
    """

    key: ChunkKey | None
    tokens: int = 0
    computed: int = 0
    reason: str | None = None


@torch.inference_mode()
def keep_generated(
    lm: LanguageModel,
    store: KVStore,
    prompts: PromptBuilder,
    prefilled: Prefilled,
    generated: tuple[int, ...],
    text: str,
    ledger: ProvenanceLedger | None = None,
) -> Kept:
    """Store the keys and values of an answer under the ids it has as a passage.

    They must be exact: the prompt prefilled in full, decoded token by token. What the passage has behind the answer is
    computed in one short pass behind the same prompt. Nothing is stored that decoding did not begin.

    Args:
        lm: the model.
        store: where to.
        prompts: how passages are written and tokenised.
        prefilled: the prompt's prefill, on whose buffer the answer was decoded.
        generated: ids of the answer as it was generated.
        text: the answer as a passage, or the beginning of it.
        ledger: what the entry is made of.

    Returns:
        The entry, or why there is none: the method may reuse stored caches, or the answer is tokenised otherwise.

    Raises:
        StoreError: if the store cannot be written.
    """
    prompt = prefilled.prompt
    if prefilled.report.base is not None:  # even where it reused nothing: rows may have been kept from seeing others
        name = prefilled.report.method
        return Kept(None, reason=f"an answer of method {name} need not be exact; ask with method full")
    ids = prompts.chunk_ids(text)
    own = sum(first < len(text) for first, _ in prompts.chunk_offsets(text))  # without the template behind it
    decoded = generated[:-1]  # the last token was never run
    known = next((i for i, pair in enumerate(zip(ids, decoded, strict=False)) if pair[0] != pair[1]), None)
    known = min(len(ids), len(decoded)) if known is None else known
    if known == 0 or known < own - MERGED:
        return Kept(None, reason=f"as a passage the answer has other tokens: {known} of {own} are as generated")
    start, stop = len(prompt), len(prompt) + len(ids)
    if stop > lm.window.tokens:
        return Kept(None, reason=f"prompt and passage exceed the context window of {lm.window.tokens:,} tokens")
    buffer = prefilled.buffer
    if known < len(ids):
        buffer = _copy_of(lm, buffer, start + known, stop)
        tail = torch.tensor(ids[known:], device=lm.device)
        plan = RowsPlan.between(start + known, stop, lm.device, lm.sliding)
        forward_hidden(lm, tail, plan, buffer, depth=lm.n_layers)
    keys = _unrotated(lm, buffer, start, stop)
    values = [layer[0, :, start:stop] for layer in buffer.values]
    context = tuple(hash_ids(span.segment.stored_ids) for span in prompt.chunks)
    facts = {"decoded": (float(known),)}
    chunk = ChunkKV.of(
        keys, values, order_by_key_norm(keys), probe_layers=lm.critical_layers, context=context, facts=facts
    )
    key = GENERATED.key(lm.fingerprint, prompt.prefix_ids, ids)
    given = [span.segment.stored_ids for span in prompt.chunks]
    if ledger is not None:
        ledger.record_origins(key, given)
    store.put(key, chunk)
    if given and ledger is not None and not ledger.confirm(key):
        return Kept(None, reason="a passage it was given over has been forgotten meanwhile")
    return Kept(key, len(ids), len(ids) - known)


def _copy_of(lm: LanguageModel, buffer: KVBuffer, filled: int, capacity: int) -> KVBuffer:
    """Return a copy with room for `capacity` tokens, of which the first `filled` are there.

    The original belongs to the answer, whose tokens stand where others are about to be computed.
    """
    copy = KVBuffer.allocate(lm.shapes, capacity, dtype=lm.dtype, device=lm.device)
    for ours, theirs in zip((*copy.keys, *copy.values), (*buffer.keys, *buffer.values), strict=True):
        ours[:, :, :filled] = theirs[:, :, :filled]
    return copy


def _unrotated(lm: LanguageModel, buffer: KVBuffer, start: int, stop: int) -> list[Tensor]:
    """Return per layer `[Hkv, stop - start, D]`, keys as they would be at position 0."""
    positions = torch.arange(start, stop, device=lm.device)
    keys = []
    for layer, rope in zip(buffer.keys, lm.ropes, strict=True):
        part = layer[0, :, start:stop]
        if rope.inv_freq is not None:
            table = angles(rope.inv_freq.to(part.device), -positions)
            part = rotate(part, *table, interleaved=rope.interleaved)
        keys.append(part)
    return keys
