"""Speculative decoding: draft on the fused cache, verify with full prefill (VeriCache, arXiv 2605.17613).

The answer is full prefill's greedy answer, token for token. There are two buffers. The fused buffer drafts tokens
cheaply; the exact buffer verifies a whole draft in a single pass.
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
from qcfuse_rag.generation.stop_criteria import PartialAnswer
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_logits
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner

DRAFT_TOKENS = 25
"""Tokens of a draft; VeriCache drafts 25 to 40."""


@dataclass(frozen=True, slots=True)
class SpeculativeGeneration(Generation):
    """A finished answer with the acceptance statistics of its drafts.

    Attributes:
        report: of the fused prefill.
        exact: the report of the exact prefill.
        drafted: number of drafted tokens.
        compared: drafted tokens that were verified; tokens after the first difference of a draft are not.
        accepted: drafted tokens that are in the answer.
        passes: verification passes over the exact cache; plain decoding takes one for every token but the first.
    """

    exact: FusionReport
    drafted: int
    compared: int
    accepted: int
    passes: int

    @property
    def agreement(self) -> float:
        """Share of the verified tokens on which the fused cache agreed with the exact cache."""
        return self.accepted / self.compared

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        counts = {name: getattr(self, name) for name in ("drafted", "compared", "accepted", "passes", "agreement")}
        return {**Generation.to_dict(self), "exact": self.exact.to_dict(), "verified": counts}


class CacheCursor:
    """One of the two caches, and the number of its valid tokens.

    Keys and values after `length` are left from a rejected draft. Nothing reads them: a row sees the keys up to its own
    position, and every position is computed again before a later one is. So rolling back only changes a number.

    Args:
        lm: the model.
        buffer: keys and values; the prompt's are computed.
        length: of the prompt, in tokens.
    """

    def __init__(self, lm: LanguageModel, buffer: KVBuffer, length: int) -> None:
        self.length = length
        self._lm, self._buffer, self._prompt_length = lm, buffer, length

    def extend(self, tokens: list[int]) -> Tensor:
        """Compute the tokens of an answer that are not cached yet, in one pass.

        Args:
            tokens: the answer so far with its draft; at least one token is not cached.

        Returns:
            `[R, vocabulary]` float32 logits after each of the `R` computed tokens.
        """
        device = self._lm.device
        start, stop = self.length, self._prompt_length + len(tokens)
        plan = RowsPlan.between(start, stop, device, self._lm.sliding)
        ids = torch.tensor(tokens[start - self._prompt_length :], device=device)
        self.length = stop
        return forward_logits(self._lm, ids, plan, self._buffer)

    def roll_back(self, accepted: int) -> None:
        """Drop the answer after its first `accepted` tokens."""
        self.length = min(self.length, self._prompt_length + accepted)


@torch.inference_mode()
def generate_speculative(
    runner: ModelRunner,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    method: Method,
    draft: int = DRAFT_TOKENS,
) -> SpeculativeGeneration:
    """Return full prefill's greedy answer, drafted on a fused cache.

    A draft is up to `draft` tokens on the fused buffer. One pass over the exact buffer computes the exact choice after
    each of them. The agreeing beginning of the draft is accepted, then one exact token, and the next draft starts
    there. A verification pass sums in another order than decoding token by token: where two tokens are equally likely
    within the rounding of the model's dtype, the choice is arbitrary, as it is in decoding.

    Full prefill computes the exact buffer here, so this costs more than full prefill alone. It is meant for audits: it
    shows what fusion would have changed. VeriCache saves time where the exact cache exists already. The exact caches of
    an ordered set of passages could be loaded, and so could the system prefix and a framed passage directly after it,
    which are stored exactly. Both buffers are in memory at once.

    Args:
        runner: the model and the store.
        prompt: the prompt.
        params: greedy sampling settings, the default.
        method: decides what the draft reuses and recomputes.
        draft: most tokens of a draft.

    Raises:
        ValueError: if `params` is not greedy or has a grammar, or `draft` is below 1.
        PromptTooLong: if prompt and answer do not fit the model's context window.
    """
    params = params or SamplingParams()
    if params.grammar is not None:
        raise ValueError("a verified answer follows the model alone, not a grammar; omit `grammar`")
    if params.temperature:
        raise ValueError(f"only greedy answers can be verified, not temperature {params.temperature}; set it to 0")
    if draft < 1:
        raise ValueError(f"a draft must have at least 1 token, got {draft}")
    lm = runner.lm
    runner.store.advance()
    run = partial(prefill, runner, prompt, answer_tokens=params.max_new_tokens)
    exact, fused = run(Method("full", base=None)), run(method.unguarded)
    started = time.perf_counter()
    answer = PartialAnswer(lm, params)
    fused_cache = CacheCursor(lm, fused.buffer, len(prompt))
    exact_cache = CacheCursor(lm, exact.buffer, len(prompt))
    drafted = [int(fused.logits.argmax())]  # the prefills give the first token of both, without a verification pass
    expected = [int(exact.logits.argmax())]
    total = compared = accepted = passes_run = 0
    while True:
        total += len(drafted)
        for index, token in enumerate(expected):
            answer.push(token)
            agrees = index < len(drafted) and drafted[index] == token
            compared += index < len(drafted)
            accepted += agrees
            if answer.finish_reason is not None or not agrees:
                break
        if answer.finish_reason is not None:
            break
        for cache in (fused_cache, exact_cache):
            cache.roll_back(len(answer.ids) - 1)
        drafted = _draft(fused_cache, answer, min(draft, answer.remaining - 1))
        expected = exact_cache.extend(answer.ids + drafted).argmax(-1).tolist()
        passes_run += 1
    answer.finish()
    elapsed = time.perf_counter() - started
    counts = {"drafted": total, "compared": compared, "accepted": accepted, "passes": passes_run}
    return SpeculativeGeneration(
        answer.text, tuple(answer.ids), answer.finish_reason, fused.report, elapsed, exact=exact.report, **counts
    )


def _draft(cache: CacheCursor, answer: PartialAnswer, count: int) -> list[int]:
    """Continue an answer greedily for at most `count` tokens, or until an end token."""
    drafted: list[int] = []
    while len(drafted) < count and not (drafted and answer.is_end_token(drafted[-1])):
        drafted.append(int(cache.extend(answer.ids + drafted)[-1].argmax()))
    return drafted
