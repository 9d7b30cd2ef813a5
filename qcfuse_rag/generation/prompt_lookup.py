"""Prompt lookup decoding (Saxena, 2023): guess an answer's next tokens from what followed its last tokens before.

Answers over passages copy names, numbers and phrases of them. One pass computes the row of the last token and those of
some candidates after it, so candidates that are chosen need no pass of their own. Tokens are chosen from the same
logits as without candidates, but for the rounding of passes with other numbers of rows.

A row beside a decode step costs a share of the step, see `row_cost`. A budget limits the candidates. Each step without
candidates adds a tenth of a step, up to `CREDIT` steps. Candidates spend the cost of their rows. An accepted candidate
adds one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qcfuse_rag.models.cpu_weights import multiplies_bfloat16
from qcfuse_rag.runtime.language_model import LanguageModel

NGRAM_SIZES = (3, 2)  # numbers of last tokens that are looked up, the longest first
CREDIT, SAVED = 2.0, 0.1
"""Steps that candidates may lose at first, and the share of a step that each step without them adds to that."""
ROW_COST, BFLOAT16_ROW_COST = 0.2, 0.04
"""Time of a further row over that of a step on a CPU: products in bfloat16 take hardly longer for eight rows."""
LONGEST_COST = 0.6
"""Time of the most candidates over that of a step; with cheap rows there are at most `MAX_TOKENS`."""
MAX_TOKENS = 7


class PromptLookup:
    """Guesses the next tokens of one answer; `row_cost` is the time of a row beside a step over that of the step."""

    def __init__(self, prompt: Sequence[int], max_tokens: int, row_cost: float) -> None:
        self._ids, self._known = list(prompt), 0
        self._prompt_tokens = len(prompt)
        self._max_tokens, self._row_cost, self._balance = max_tokens, row_cost, CREDIT
        self._next_index: dict[tuple[int, ...], int] = {}

    def candidates(self, answer: Sequence[int], limit: int) -> list[int]:
        """Return what followed the last tokens where they last stood; empty if nowhere, or if candidates do not pay.

        The answer begins with that of the call before.
        """
        self._ids += answer[len(self._ids) - self._prompt_tokens :]
        self._learn()
        limit = min(limit, self._max_tokens, int(self._balance / self._row_cost))
        found = (self._next_index.get(tuple(self._ids[-size:])) for size in NGRAM_SIZES)
        start = next((index for index in found if index is not None), None)
        if start is None or limit < 1:
            self._balance = min(CREDIT, self._balance + SAVED)
            return []
        candidates = self._ids[start : start + limit]
        self._balance -= self._row_cost * len(candidates)
        return candidates

    def accept(self) -> None:
        """Note that a candidate was chosen, which saves a step."""
        self._balance = min(CREDIT, self._balance + 1)

    def _learn(self) -> None:
        for stop in range(max(1, self._known), len(self._ids)):
            for size in NGRAM_SIZES:
                if stop >= size:
                    self._next_index[tuple(self._ids[stop - size : stop])] = stop
        self._known = len(self._ids)


def prompt_lookup(lm: LanguageModel, prompt: Sequence[int], max_tokens: int | None) -> PromptLookup | None:
    """Return the lookup of one answer; None on GPUs, whose steps are recorded for single rows.

    `max_tokens` are the most candidates of a pass; None chooses by the cost of rows, 0 turns the lookup off.
    """
    if lm.device.type != "cpu" or max_tokens == 0:
        return None
    row_cost = BFLOAT16_ROW_COST if lm.dtype == torch.bfloat16 and multiplies_bfloat16() else ROW_COST
    return PromptLookup(prompt, max_tokens or min(MAX_TOKENS, round(LONGEST_COST / row_cost)), row_cost)
