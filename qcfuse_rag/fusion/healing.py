"""Healing: compute the rest of a fused prompt, until the cache equals full prefill's.

All rows behind the exact beginning of the prompt are computed in ascending order, without a gap, and written over the
reused keys and values. A row sees only positions up to its own. All of them are exact, so the row is exact too, by
induction. The rows of a drafted answer follow those of the prompt: their logits are full prefill's before each token of
the draft. That verifies a greedy answer, as drafts are verified in speculative decoding (VeriCache, arXiv 2605.17613),
without a second cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.runtime.device import to_device
from qcfuse_rag.runtime.forward import forward_logits, forward_rows
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner

Mask = Callable[[Sequence[int], Tensor], Tensor]


class Healing:
    """Heals the cache of one request, in place. An answer is given as the token ids so far.

    Args:
        runner: the model.
        prefilled: the prompt, with capacity for the answer.
        mask: removes the tokens that may not follow an answer, given its tokens so far and the `[vocabulary]` logits
            after them; None allows all. It is asked for ever longer answers.

    Attributes:
        healed: number of leading positions whose keys and values are full prefill's; the positions from here on are
            not exact yet.
        buffer: keys and values of prompt and answer.
    """

    def __init__(self, runner: ModelRunner, prefilled: Prefilled, mask: Mask | None = None) -> None:
        self.healed, self._mask = prefilled.exact_tokens, mask
        self._runner, self.buffer, self._prompt = runner, prefilled.buffer, prefilled.prompt
        # The exact greedy token for each index of the answer, as far as the logits before it are exact.
        self._expected: list[int] = []
        if self.healed == len(self._prompt):
            self._expect(prefilled.logits[None], ())

    @property
    def prompt_left(self) -> int:
        """Number of rows of the prompt to heal, without its last row, whose logits choose the first token."""
        return max(0, len(self._prompt) - 1 - self.healed)

    def verified(self, answer: Sequence[int]) -> int | None:
        """Return how many leading tokens are full prefill's greedy tokens; None before any exact logits are known."""
        if not self._expected:
            return None
        pairs = zip(self._expected, answer, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def advance(self, rows: int) -> None:
        """Heal at most so many rows in a pass of their own; there are some left."""
        self._compute(self.healed + min(rows, self.prompt_left))

    def step(self, answer: Sequence[int], rows: int) -> Tensor:
        """Compute the row of the answer's last token, and heal at most so many rows in the same pass.

        Returns `[vocabulary]` float32 logits after that token.
        """
        last = len(self._prompt) + len(answer) - 1
        return self._compute(self.healed + min(rows, self.prompt_left), answer, (last,), n_logits=1)[0]

    def finish(self, answer: Sequence[int]) -> Tensor:
        """Heal all that is left in one pass, with all rows of an answer of which none has been healed.

        Returns `[len(answer) + 1, vocabulary]` float32 logits of full prefill, before each token and after the last.
        """
        logits = self._compute(len(self._prompt) + len(answer), answer, n_logits=len(answer) + 1)
        self._expect(logits, answer)
        return logits

    def note_step(self, answer: Sequence[int], logits: Tensor) -> None:
        """Note that the row of the answer's last token was computed by a decode step, with these logits after it."""
        if self.healed >= len(self._prompt) + len(answer) - 1:
            self._expect(logits[None], answer)
            self.healed = len(self._prompt) + len(answer)

    def shorten(self, answer: Sequence[int]) -> None:
        """Note that an answer was cut behind these tokens; the rows of the tokens that were cut off are not read."""
        self.healed = min(self.healed, len(self._prompt) + len(answer))
        del self._expected[len(answer) + 1 :]

    @torch.inference_mode()
    def restart(self) -> Tensor:
        """Compute the whole prompt anew, in one pass; return `[vocabulary]` float32 logits of the first token."""
        lm, length = self._runner.lm, len(self._prompt)
        plan = RowsPlan.between(0, length, lm.device, lm.sliding)
        logits = forward_rows(lm, torch.tensor(self._prompt.ids, device=lm.device), plan, self.buffer)
        self.healed, self._expected = length, []
        self._expect(logits[None], ())
        return logits

    @torch.inference_mode()
    def _compute(
        self, stop: int, answer: Sequence[int] = (), further: Sequence[int] = (), *, n_logits: int = 0
    ) -> Tensor:
        """Compute the rows up to `stop` and further ones; return the logits after the last `n_logits` rows."""
        lm, length, prefills = self._runner.lm, len(self._prompt), self._runner.prefills
        rows = [*range(self.healed, stop), *further]
        ids = [self._prompt.ids[row] if row < length else answer[row - length] for row in rows]
        tokens = to_device(torch.tensor(ids), lm.device)
        plan = RowsPlan.of(torch.tensor(rows), lm.sliding, device=lm.device)
        if n_logits > 1:
            logits = forward_logits(lm, tokens, plan, self.buffer, last=n_logits)
        elif n_logits:
            logits = prefills.logits(tokens, plan, self.buffer)[None]
        else:
            logits = torch.empty(0)
            prefills.hidden(tokens, plan, self.buffer, depth=lm.n_layers)
        self.healed = stop
        return logits

    def _expect(self, logits: Tensor, answer: Sequence[int]) -> None:
        """Keep the greedy tokens of exact logits, the last of which are those after the answer so far."""
        first = len(answer) + 1 - len(logits)  # index in the answer of the first of these tokens
        del self._expected[first:]
        if self._mask is not None:
            logits = torch.stack([self._mask(answer[: first + i], row) for i, row in enumerate(logits)])
        self._expected += logits.argmax(-1).tolist()
