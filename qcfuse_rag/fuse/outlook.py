"""What a fused prefill would do, told from the prompt and a look at what is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qcfuse_rag.fuse.probe import QuestionProbe
from qcfuse_rag.ingest.base import BLIND
from qcfuse_rag.model.language_model import LanguageModel
from qcfuse_rag.prompt.segments import Prompt, Role
from qcfuse_rag.store.contract import KVStore

if TYPE_CHECKING:
    from qcfuse_rag.fuse.method import Method


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a fused prefill would do, known before anything is loaded.

    Attributes:
        prompt_tokens: length of the prompt.
        stored_tokens: tokens of its segments that the store has.
        selected_tokens: stored tokens that would be recomputed.
        probe_rows: rows the method's probe computes; 0 without one.
        probe_share: share of the layers it computes them in.
        passages: how many the prompt has.
        absent: how many of them the store does not have.
    """

    prompt_tokens: int
    stored_tokens: int
    selected_tokens: int
    probe_rows: int
    probe_share: float
    passages: int = 0
    absent: int = 0

    @property
    def rows(self) -> int:
        """Rows the fused pass would compute."""
        return self.prompt_tokens - self.stored_tokens + self.selected_tokens


def outlook(lm: LanguageModel, store: KVStore, prompt: Prompt, method: Method) -> Outlook:
    """Look into the store without loading anything.

    A segment counts as stored if the store has it under any base the method reads; whether it can be read is not tried.
    """
    stored = inexact = absent = 0
    for span in prompt.spans:
        bases = {Role.HEAD: (BLIND,), Role.CHUNK: method.bases}.get(span.segment.role, ())
        there = [one for one in bases if one.key(lm.fingerprint, prompt.frame, span.segment.stored_ids) in store]
        stored += len(span) if there else 0
        absent += span.segment.role is Role.CHUNK and not there
        before = prompt.ids[: span.start]
        exact = span.segment.role is Role.HEAD or any(one.exact_behind(before, prompt.frame) for one in there)
        inexact += len(span) if there and not exact else 0
    selected = method.budget.tokens(inexact) if method.budget is not None else 0
    after = max((span.stop for span in prompt.chunks), default=0)
    probing = method.probe is not None and selected > 0
    depth = method.probe.depth(lm) if isinstance(method.probe, QuestionProbe) else lm.n_layers
    probe_rows = len(prompt) - after if probing else 0
    return Outlook(len(prompt), stored, selected, probe_rows, depth / lm.n_layers, len(prompt.chunks), absent)
