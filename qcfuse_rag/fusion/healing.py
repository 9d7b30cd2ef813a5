"""Healing: compute the rest of a fused prompt while its answer is decoded, until the cache equals full prefill's.

A decode step reads all weights of the model for one row, so some more rows cost little beside it. Healing computes rows
of the prompt in two orders, and writes them over the reused keys and values. First it computes the tokens that the
answer attends to most, see `AttendedTokens`; this brings the next tokens nearer to full prefill's soonest. Then it
computes all rows behind the exact beginning of the prompt in ascending order, without a gap. A row sees only positions
up to its own. All of them are exact, so the row is exact too, by induction. The rows of the answer follow those of the
prompt: their logits are full prefill's before each token of the answer. That verifies a greedy answer, as drafts are
verified in speculative decoding (VeriCache, arXiv 2605.17613), without a second cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.device import to_device
from qcfuse_rag.runtime.forward import forward_logits, forward_rows
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import AttentionParams, RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner

Mask = Callable[[Sequence[int], Tensor], Tensor]


class AttendedTokens:
    """Reused tokens of a prompt that were not recomputed, in the order of the attention that the answer pays to them.

    The attention is that of the answer's tokens so far in the upper half of the layers, where every layer and every
    token of the answer has the same weight. The scores of the method's probe count as much as one token.

    Args:
        lm: the model.
        prefilled: the prompt.
        share: share of the reused passage tokens to take in total, from 0 to 1.

    Attributes:
        left: number of tokens that are still to be taken.
    """

    def __init__(self, lm: LanguageModel, prefilled: Prefilled, share: float) -> None:
        length = len(prefilled.prompt)
        reused = torch.zeros(length, dtype=torch.bool)
        for lookup in prefilled.report.lookups:
            if lookup.hit:
                reused[lookup.start : lookup.start + lookup.tokens] = True
        for span in prefilled.prompt.chunks:  # passages of earlier turns
            reused[span.start : min(span.stop, prefilled.report.prefix_tokens)] = True
        reused[: prefilled.exact_tokens] = False
        reused[list(prefilled.report.selected)] = False
        self.left = int(share * int(reused.sum()))
        self._first_layer = lm.n_layers // 2
        self._layers = lm.n_layers - self._first_layer
        self._reused = reused.to(lm.device)
        self._scores = torch.zeros(length, device=lm.device)
        self._known = False
        if prefilled.scores is not None and self.left:
            self._add(prefilled.scores.mean, 1.0)

    def take(self, count: int) -> list[int]:
        """Return the positions of at most `count` further tokens, ascending; none before any attention is known."""
        count = min(count, self.left)
        if count <= 0 or not self._known:
            return []
        best = self._scores.topk(count).indices.sort().values
        self._reused[best] = False
        self._scores[best] = 0
        self.left -= count
        positions: list[int] = best.tolist()
        return positions

    def observe(self, layer: int, query: Tensor, key: Tensor, params: AttentionParams) -> None:
        """Add the attention of a pass's last row, which is the answer's last token; see `RowsPlan.observe`."""
        if layer < self._first_layer:
            return
        keys = key.shape[2]
        row = torch.full((1,), keys - 1, device=key.device)  # made on the device: a copy would make the host wait
        known = torch.ones(keys, dtype=torch.bool, device=key.device)
        weights = attention_weights(query[:, :, -1:], key, row, known, params)
        self._add(weights[: len(self._scores)], 1 / self._layers)

    def _add(self, weights: Tensor, weight: float) -> None:
        attended = torch.where(self._reused, weights, 0.0)
        self._scores += attended * (weight / attended.sum().clamp_min(1e-12))
        self._known = True


class Healing:
    """Heals the cache of one request, in place. An answer is given as the token ids so far.

    A pass that fails leaves `healed` as it was. The rows that it has written are at least as near to full prefill's as
    those before, so the cache stays usable.

    Args:
        runner: the model.
        prefilled: the prompt, with capacity for the answer.
        attended: share of the reused passage tokens to compute first, by the attention that the answer pays to them;
            0 heals in ascending order from the start.
        mask: removes the tokens that may not follow an answer, given its tokens so far and the `[vocabulary]` logits
            after them; None allows all. It is asked for ever longer answers.

    Attributes:
        healed: number of leading positions whose keys and values are full prefill's; the positions from here on are
            not exact yet.
        buffer: keys and values of prompt and answer; a reader bias is left only where they are not exact.
    """

    def __init__(
        self, runner: ModelRunner, prefilled: Prefilled, attended: float = 0.0, *, mask: Mask | None = None
    ) -> None:
        self.healed, self._mask = prefilled.exact_tokens, mask
        self._attended = AttendedTokens(runner.lm, prefilled, attended)
        self._runner, self.buffer, self._prompt = runner, prefilled.buffer, prefilled.prompt
        # The exact greedy token for each index of the answer, as far as the logits before it are exact.
        self._expected: list[int] = []
        if self.healed == len(self._prompt):
            self._expect(prefilled.logits[None], ())

    @property
    def prompt_left(self) -> int:
        """Number of rows of the prompt to heal, without its last row, whose logits choose the first token."""
        return max(0, len(self._prompt) - 1 - self.healed)

    def prefix_is_exact(self, answer: Sequence[int]) -> bool:
        """Return whether every position before the answer's last token is exact, so that its row will be exact too."""
        return self.healed >= len(self._prompt) + len(answer) - 1

    def verified(self, answer: Sequence[int]) -> int | None:
        """Return how many leading tokens are full prefill's greedy tokens; None before any exact logits are known."""
        if not self._expected:
            return None
        pairs = zip(self._expected, answer, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def advance(self, answer: Sequence[int], rows: int) -> None:
        """Heal at most so many rows in a pass of their own.

        In ascending order the row of the answer's last token is left out. While the most attended tokens are computed,
        it is computed too, to observe its attention; its step computes it again.
        """
        if answer and self._attended.left and rows < self.prompt_left:
            self._compute_attended(answer, rows)
            return
        stop = min(self.healed + rows, len(self._prompt) + len(answer) - 1)
        if stop > self.healed:
            self._compute(answer, stop)

    def step(self, answer: Sequence[int], rows: int) -> Tensor:
        """Compute the row of the answer's last token, and heal at most so many rows before it in the same pass.

        Args:
            answer: the token ids so far, at least one.
            rows: most rows to heal.

        Returns:
            `[vocabulary]` float32 logits after the last token.
        """
        if self._attended.left and 0 < rows < self.prompt_left:
            return self._compute_attended(answer, rows)
        last = len(self._prompt) + len(answer) - 1
        return self._compute(answer, min(self.healed + rows, last), step=True)[-1]

    def finish(self, answer: Sequence[int]) -> Tensor:
        """Heal all that is left in one pass, the row of the answer's last token included.

        Args:
            answer: the token ids so far, none or more, of which no row has been healed.

        Returns:
            `[len(answer) + 1, vocabulary]` float32 logits of full prefill, before each token and after the last.
        """
        return self._compute(answer, len(self._prompt) + len(answer))

    def note_step(self, answer: Sequence[int], logits: Tensor) -> None:
        """Note that the row of the answer's last token was computed by a decode step, with these logits after it."""
        if self.prefix_is_exact(answer):
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
    def _compute_attended(self, answer: Sequence[int], count: int) -> Tensor:
        """Compute the most attended tokens and the row of the answer's last token; return the logits after it."""
        lm, last = self._runner.lm, len(self._prompt) + len(answer) - 1
        positions = self._attended.take(count)
        ids = [*(self._prompt.ids[position] for position in positions), answer[-1]]
        tokens = to_device(torch.tensor(ids), lm.device)
        rows = torch.tensor([*positions, last])
        plan = RowsPlan.of(rows, lm.sliding, device=lm.device, observe=self._attended.observe)
        return self._runner.prefills.logits(tokens, plan, self.buffer)

    @torch.inference_mode()
    def _compute(self, answer: Sequence[int], stop: int, *, step: bool = False) -> Tensor:
        """Compute the rows up to `stop` and, for a step, that of the last token."""
        lm, length, runner = self._runner.lm, len(self._prompt), self._runner
        last = length + len(answer) - 1
        rows = [*range(self.healed, stop), *([last] if step else [])]
        first_index = max(self.healed, length - 1) - (length - 1)  # of the answer's tokens
        healed_logits = max(0, stop - (length - 1) - first_index)
        n_logits = healed_logits + step
        ids = [self._prompt.ids[row] if row < length else answer[row - length] for row in rows]
        tokens = to_device(torch.tensor(ids), lm.device)
        plan = RowsPlan.of(torch.tensor(rows), lm.sliding, device=lm.device)
        if not n_logits:
            runner.prefills.hidden(tokens, plan, self.buffer, depth=lm.n_layers)
            logits = torch.empty(0)
        elif n_logits == 1:
            logits = runner.prefills.logits(tokens, plan, self.buffer)[None]
        else:
            logits = forward_logits(lm, tokens, plan, self.buffer, last=n_logits)
        if healed_logits:
            self._expect(logits[:healed_logits], answer[: first_index + healed_logits - 1])
        self.healed = stop
        if step and stop == last:  # the last token's row has seen exact positions only
            self._expect(logits[-1:], answer)
            self.healed = last + 1
        return logits

    def _expect(self, logits: Tensor, answer: Sequence[int]) -> None:
        """Keep the greedy tokens of exact logits, the last of which are those after the answer so far."""
        first = len(answer) + 1 - len(logits)  # index in the answer of the first of these tokens
        del self._expected[first:]
        if self._mask is not None:
            logits = torch.stack([self._mask(answer[: first + i], row) for i, row in enumerate(logits)])
        self._expected += logits.argmax(-1).tolist()
