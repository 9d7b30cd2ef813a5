"""VeriCache (arXiv 2605.17613): draft on the fused cache, check on the exact one, keep what both say.

The answer is full prefill's greedy answer, token for token. Drafting and checking are two buffers: the fused one, on
which tokens are cheap, and an exact one, on which a whole draft is checked in a single pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import prefill
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.decode import Generation
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.generation.stop_criteria import Answer
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_logits
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.loading.loading import Loading
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.store.backends.base import KVStore

DRAFT_TOKENS = 25
"""Tokens between two checks; VeriCache drafts 25 to 40."""


@dataclass(frozen=True, slots=True)
class VerifiedGeneration(Generation):
    """A finished answer, and how far the draft agreed with it.

    `report` is of the fused prefill, `exact` of the other.

    Attributes:
        exact: what the exact prefill did.
        drafted: tokens that were drafted.
        compared: drafted tokens that were checked; behind the first difference of a draft nothing is.
        accepted: drafted tokens that are in the answer.
        passes: checking passes over the exact cache; plain decoding takes one for every token but the first.
    """

    exact: FusionReport
    drafted: int
    compared: int
    accepted: int
    passes: int

    @property
    def agreement(self) -> float:
        """Share of the checked tokens that the fused cache chose as the exact one did."""
        return self.accepted / self.compared

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        counts = {name: getattr(self, name) for name in ("drafted", "compared", "accepted", "passes", "agreement")}
        return {**Generation.to_dict(self), "exact": self.exact.to_dict(), "verified": counts}


class Side:
    """One of the two caches, and how much of prompt and answer it holds.

    Keys and values behind `held` are left from a draft that was not accepted. Nothing sees them: a row sees the keys
    up to its own position, and every position is computed again before a later one is. So rolling back is a number.
    """

    def __init__(self, lm: LanguageModel, buffer: KVBuffer, held: int) -> None:
        self.held = held
        self._lm, self._buffer, self._prompt = lm, buffer, held

    def follow(self, tokens: list[int]) -> Tensor:
        """Compute those tokens of an answer that are not held yet, in one pass.

        Args:
            tokens: the answer so far, a draft included; at least one is not held.

        Returns:
            `[R, vocabulary]` float32, what follows each of the `R` tokens computed.
        """
        device = self._lm.device
        start, stop = self.held, self._prompt + len(tokens)
        plan = RowsPlan.between(start, stop, device, self._lm.sliding)
        ids = torch.tensor(tokens[start - self._prompt :], device=device)
        self.held = stop
        return forward_logits(self._lm, ids, plan, self._buffer)

    def roll_back(self, accepted: int) -> None:
        """Forget what is held of the answer behind its first `accepted` tokens."""
        self.held = min(self.held, self._prompt + accepted)


@torch.inference_mode()
def generate_verified(
    lm: LanguageModel,
    store: KVStore,
    prompt: Prompt,
    method: Method,
    params: SamplingParams,
    *,
    draft: int = DRAFT_TOKENS,
    loading: Loading | None = None,
    passes: PrefillRunner | None = None,
) -> VerifiedGeneration:
    """Answer greedily as full prefill would, drafting on what a method fuses.

    A draft is up to `draft` tokens on the fused buffer; one pass over the exact buffer says what exact decoding takes
    after each of them. The draft's beginning that agrees is accepted, then one exact token more, and the next draft
    starts there. A checking pass adds up in another order than one token at a time: where two tokens are as likely to
    within the rounding of the model's dtype, the choice between them is as arbitrary as it is in decoding.

    The exact buffer is computed here by full prefill, so this costs more than full prefill alone: it is for audits, and
    for knowing what fusion would have changed. VeriCache gains its time where the exact cache is at hand: an ordered
    set of passages that was kept exactly could be loaded into it, and so could the prompt's head and a framed passage
    right behind it, which are exact as they are stored. Two buffers are held at once.

    Args:
        lm: the model.
        store: where chunks may be found.
        prompt: the prompt.
        method: what the draft reuses and recomputes.
        params: greedy.
        draft: tokens between two checks.
        loading: how to go on loading while computing, and how long to wait; see `fusion.pipeline.prefill`.
        passes: of the model, recorded ones perhaps.

    Raises:
        ValueError: if the answer is not to be greedy, or a draft has no tokens.
        PromptTooLong: if prompt and answer do not fit the model's context window.
    """
    if params.grammar is not None:
        raise ValueError("a verified answer follows the model alone, not a grammar; leave `grammar` out")
    if params.temperature:
        raise ValueError(f"only greedy answers can be verified, not temperature {params.temperature}; set it to 0")
    if draft < 1:
        raise ValueError(f"a draft must have at least 1 token, got {draft}")
    done = partial(prefill, lm, store, prompt, room=params.max_new_tokens, loading=loading, passes=passes)
    exact, fused = done(Method("full", base=None)), done(method)
    started = time.perf_counter()
    answer = Answer(lm, params)
    quick, sure = Side(lm, fused.buffer, len(prompt)), Side(lm, exact.buffer, len(prompt))
    drafted = [int(fused.logits.argmax())]  # by the prefills alone: nothing to check in a pass
    right = [int(exact.logits.argmax())]
    total = compared = accepted = checks = 0
    while True:
        total += len(drafted)
        for index, token in enumerate(right):
            answer.push(token)
            agrees = index < len(drafted) and drafted[index] == token
            compared += index < len(drafted)
            accepted += agrees
            if answer.reason is not None or not agrees:
                break
        if answer.reason is not None:
            break
        for side in (quick, sure):
            side.roll_back(len(answer.ids) - 1)
        drafted = _draft(quick, answer, min(draft, answer.left - 1))
        right = sure.follow(answer.ids + drafted).argmax(-1).tolist()
        checks += 1
    answer.finish()
    elapsed = time.perf_counter() - started
    counts = {"drafted": total, "compared": compared, "accepted": accepted, "passes": checks}
    return VerifiedGeneration(
        answer.text, tuple(answer.ids), answer.reason, fused.report, elapsed, exact=exact.report, **counts
    )


def _draft(side: Side, answer: Answer, count: int) -> list[int]:
    """Go on greedily from an answer for `count` tokens, or until one ends it."""
    drafted: list[int] = []
    while len(drafted) < count and not (drafted and answer.ends_with(drafted[-1])):
        drafted.append(int(side.follow(answer.ids + drafted)[-1].argmax()))
    return drafted
