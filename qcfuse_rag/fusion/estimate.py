"""What a fused prefill would do, told from the prompt and a look at what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qcfuse_rag.fusion.guard import PrefillEstimate
from qcfuse_rag.fusion.probes import QuestionProbe
from qcfuse_rag.prompts.segments import Prompt, Role
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.prefill_base import BLIND

if TYPE_CHECKING:
    from qcfuse_rag.fusion.method import Method


def estimate_prefill(lm: LanguageModel, store: KVStore, prompt: Prompt, method: Method) -> PrefillEstimate:
    """Look into the store without loading anything.

    A segment counts as stored if the store has it under any base the method reads; whether it can be read is not tried.
    """
    stored = inexact = absent = 0
    for span in prompt.spans:
        bases = {Role.HEAD: (BLIND,), Role.CHUNK: method.bases}.get(span.segment.role, ())
        there = [one for one in bases if one.key(lm.fingerprint, prompt.prefix_ids, span.segment.stored_ids) in store]
        stored += len(span) if there else 0
        absent += span.segment.role is Role.CHUNK and not there
        before = prompt.ids[: span.start]
        exact = span.segment.role is Role.HEAD or any(one.exact_behind(before, prompt.prefix_ids) for one in there)
        inexact += len(span) if there and not exact else 0
    selected = method.budget.tokens(inexact) if method.budget is not None else 0
    after = max((span.stop for span in prompt.chunks), default=0)
    probing = method.probe is not None and selected > 0
    depth = method.probe.depth(lm) if isinstance(method.probe, QuestionProbe) else lm.n_layers
    probe_rows = len(prompt) - after if probing else 0
    return PrefillEstimate(len(prompt), stored, selected, probe_rows, depth / lm.n_layers, len(prompt.chunks), absent)
