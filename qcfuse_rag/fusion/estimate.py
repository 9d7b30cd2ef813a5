"""Estimate the work of a fused prefill from the prompt and the keys in the store, before anything is loaded."""

from __future__ import annotations

from qcfuse_rag.fusion.guard import PrefillEstimate
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.prompts.segments import Prompt, Role
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.key import ChunkKey
from qcfuse_rag.store.prefill_base import BLIND


def estimate_prefill(
    lm: LanguageModel, store: KVStore, prompt: Prompt, method: Method, start: int = 0
) -> PrefillEstimate:
    """Estimate the rows and tokens of a fused prefill without loading anything.

    A segment counts as stored if the store has it under any base that the method reads, whether or not the entry turns
    out to be readable.

    Args:
        lm: the model.
        store: the store.
        prompt: the prompt.
        method: what to reuse and what to recompute.
        start: first position that is not reused from an earlier request.
    """
    stored_tokens = near_tokens = inexact_tokens = absent = asking_tokens = 0
    far_keys: list[ChunkKey] = []
    nearest = store.tiers[0] if len(store.tiers) > 1 else None

    def is_near(key: ChunkKey) -> bool:
        return nearest is not None and store.address(key) in nearest

    passages = [span for span in prompt.chunks if span.start >= start]
    for span in prompt.spans:
        if span.start < start:
            continue
        bases = {Role.SYSTEM_PREFIX: (BLIND,), Role.CHUNK: method.bases}.get(span.segment.role, ())
        exact = {base: base.exact_at(span.start, prompt.ids, prompt.prefix_ids) for base in bases}
        ids, exact_first = span.segment.stored_ids, sorted(bases, key=exact.__getitem__, reverse=True)
        keys = ((base, base.key(lm.fingerprint, prompt.prefix_ids, ids)) for base in exact_first)
        found = next(((base, key) for base, key in keys if is_near(key) or key in store), None)
        if found is None:
            is_passage = span.segment.role is Role.CHUNK
            absent += is_passage
            asking_tokens += 0 if is_passage else len(span)
            continue
        base, key = found
        stored_tokens += len(span)
        inexact_tokens += 0 if exact[base] else len(span)
        if nearest is None or is_near(key):
            near_tokens += len(span)
            continue
        far_keys.append(key)
        if method.base in exact and method.base != base:  # a lookup asks for it before another base that is exact
            own_key = method.base.key(lm.fingerprint, prompt.prefix_ids, ids)
            far_keys += [] if is_near(own_key) else [own_key]
    selected_tokens = method.budget.tokens(inexact_tokens) if method.budget is not None else 0
    depth = method.probe.depth(lm) if isinstance(method.probe, QuestionProbe) else lm.n_layers
    return PrefillEstimate(
        prompt_tokens=len(prompt) - start,
        stored_tokens=stored_tokens,
        selected_tokens=selected_tokens,
        probe_rows=asking_tokens if method.probe is not None and selected_tokens > 0 else 0,
        probe_share=depth / lm.n_layers,
        passages=len(passages),
        absent=absent,
        near_tokens=near_tokens,
        far_keys=tuple(far_keys),
        held_tokens=start,
    )


def rows_if_stored(prompt: Prompt, method: Method, start: int = 0) -> int:
    """Return the rows that a prefill from `start` on computes if every passage is stored; nothing is looked up."""
    if method.base is None:
        return len(prompt) - start
    passage_tokens = sum(len(span) for span in prompt.chunks if span.start >= start)
    selected_tokens = method.budget.tokens(passage_tokens) if method.budget is not None else 0
    return len(prompt) - start - passage_tokens + selected_tokens
