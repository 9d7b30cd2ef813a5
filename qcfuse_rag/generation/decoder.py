"""Decode one answer token by token, and heal the prompt's cache as far as the request asks."""

from __future__ import annotations

import logging
import math
import traceback
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from qcfuse_rag.fusion.healing import Healing, Mask
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.grammar import Constraint
from qcfuse_rag.generation.logprobs import TokenLogprob, token_logprob
from qcfuse_rag.generation.prompt_lookup import prompt_lookup
from qcfuse_rag.generation.sampling import Sampler
from qcfuse_rag.generation.sampling_params import Fidelity, SamplingParams
from qcfuse_rag.generation.stop_criteria import FinishReason, PartialAnswer
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_logits
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner

LOG = logging.getLogger(__name__)

DRAFT_TOKENS = 32
"""Most tokens that `exact` drafts before it verifies them; VeriCache drafts 25 to 40."""

ATTENDED = 0.2
"""Share of the reused tokens that `heal` computes in the order of the answer's attention, before the rest in order."""

ROWS_PER_PASS = 256
"""Rows of a pass that only heals: between two of them a request can be cancelled."""


@dataclass(frozen=True, slots=True)
class HealingReport:
    """The work and outcome of healing for one answer.

    Attributes:
        fidelity: as the request asked.
        prompt_tokens: length of the prompt.
        exact_tokens: leading positions of the prompt whose keys and values are full prefill's at the end.
        verified_upto: number of leading answer tokens that are known to be full prefill's greedy tokens, under the
            answer's grammar if it has one; None if nothing can be verified: the answer is sampled, or the prompt was
            not healed through.
        drafted: tokens that `exact` drafted on the fused cache.
        accepted: leading drafted tokens that are full prefill's.
        reason: why the prompt was not healed through, or how an error was survived; None if all went well.
    """

    fidelity: Fidelity
    prompt_tokens: int
    exact_tokens: int
    verified_upto: int | None
    drafted: int = 0
    accepted: int = 0
    reason: str | None = None


class AnswerDecoder:
    """The state of an answer while it is decoded: its tokens, the next logits, and healing.

    `choose` and `compute` take turns until there is a `finish_reason`. A scheduler may compute the steps of several
    answers together instead, see `needs_step`, `take_logits` and `heal`.

    With `exact`, tokens are first drafted on the fused cache while it is healed, and held back. When the prompt is
    healed, one pass verifies the draft. Its agreeing beginning becomes the answer, which goes on over the exact cache.
    An answer that is sampled, has penalties or follows a grammar is not drafted: its first token comes when the prompt
    is healed.

    With `fast`, the rows of candidates for the next tokens are computed beside steps, see `generation.prompt_lookup`.

    Args:
        runner: the model.
        prefilled: the prompt.
        params: how to choose tokens, when to stop, and how much to heal.
        sampler: chooses the tokens.

    Attributes:
        answer: the tokens so far and their text; while it is held back, the draft.
        holds_back: whether the answer is a draft that waits for verification.
        passes: number of decode passes over the answer's tokens; healing and verifying are not counted.
    """

    def __init__(self, runner: ModelRunner, prefilled: Prefilled, params: SamplingParams, sampler: Sampler) -> None:
        self._runner, self._prefilled, self._params, self._sampler = runner, prefilled, params, sampler
        self._logits: Tensor | None = prefilled.logits
        self._verified_text = ""
        self._logprobs: list[TokenLogprob] = []
        self._drafted = self._accepted = self._rows = 0
        self._interval = 1
        self._reason: str | None = None
        self.answer = PartialAnswer(runner.lm, params)
        self.holds_back = False
        self.passes = 0
        self._lookup = None
        self._ahead: deque[tuple[int, Tensor]] = deque()  # candidates with the logits after them
        if params.fidelity == "fast":
            self._lookup = prompt_lookup(runner.lm, prefilled.prompt.ids, params.prompt_lookup_num_tokens)
        attended = ATTENDED if params.fidelity == "heal" else 0.0
        self._healing = None if params.fidelity == "fast" else Healing(runner, prefilled, attended, mask=self._mask())
        left = len(prefilled.prompt) - prefilled.exact_tokens
        if self._healing is None or not left:
            return
        if params.fidelity == "heal":
            self._rows, self._interval = self._pace()
        else:
            self._rows, self.holds_back = math.ceil(left / DRAFT_TOKENS), True
        if self._draft_is_complete:
            self._logits = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is finished; None before that, and for a draft."""
        return None if self.holds_back else self.answer.finish_reason

    @property
    def position(self) -> int:
        """Position of the last token."""
        return len(self._prefilled.prompt) + len(self.answer.ids) - 1

    @property
    def buffer(self) -> KVBuffer:
        """Keys and values of prompt and answer."""
        return self._prefilled.buffer if self._healing is None else self._healing.buffer

    @property
    def needs_step(self) -> bool:
        """Whether the next pass computes the last token's row; False while a finished draft waits for verification."""
        return self._logits is None and not (self.holds_back and self._draft_is_complete)

    @property
    def needs_healing(self) -> bool:
        """Whether there are rows to heal, beside the steps or instead of them, or a draft to verify."""
        if self._healing is None:
            return False
        return self.holds_back or (self._rows > 0 and not self._healing.prefix_is_exact(self.answer.ids))

    @property
    def verified_upto(self) -> int | None:
        """Number of leading answer tokens known to be full prefill's greedy tokens; None if nothing is verified yet."""
        if self._healing is None or self.holds_back or not self._params.is_greedy:
            return None
        return self._healing.verified(self.answer.ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The log probabilities of the answer's tokens so far, without a draft's; None if the request asks for none."""
        return None if self._params.logprobs is None else tuple(self._logprobs)

    def report(self) -> HealingReport | None:
        """Return what healing did so far; None for `fast`."""
        if self._healing is None:
            return None
        length = len(self._prefilled.prompt)
        exact, reason = min(self._healing.healed, length), self._reason
        if reason is None and self._healing.prompt_left:
            reason = f"the answer ended when {exact:,} of {length:,} prompt tokens were exact"
        return HealingReport(
            self._params.fidelity, length, exact, self.verified_upto, self._drafted, self._accepted, reason
        )

    def cancel(self) -> str:
        """End the answer and drop a draft; return the text that was certain and not yet returned."""
        if self.holds_back:
            self._drop_draft()
        self.answer.finish_reason = "cancelled"
        return self._take_verified_text()

    def retain(self) -> None:
        """Keep the keys and values for later prompts that begin with this one; nothing may be decoded after that.

        The rows of the last token were not computed.
        """
        lease, prompt = self._prefilled.lease, self._prefilled.prompt
        if lease is None:
            return
        answer = self.answer.ids[:-1]
        exact = self._prefilled.exact_tokens if self._healing is None else self._healing.healed
        if exact >= len(prompt) and self._healing is None:
            exact = len(prompt) + len(answer)
        try:
            lease.keep(prompt, answer, self.buffer, min(exact, len(prompt) + len(answer)))
        except Exception as error:  # such as memory that is used up; the answer is complete
            LOG.warning("the answer's keys and values were not kept: %s", error)

    def choose(self) -> str:
        """Choose the next token, if its logits are there; return the text that is now certain, often empty."""
        text = self._take_verified_text()
        if self._logits is None or self.answer.finish_reason is not None:
            return text
        token = self._sampler(self._logits, self._prefilled.prompt.ids, self.answer.ids)
        if not self.holds_back:
            self._note_logprob(self._logits, token)
        self._logits = self._logits_after(token)
        piece = self.answer.push(token)
        return text if self.holds_back else text + piece

    def compute(self) -> None:
        """Compute the last token's row, with rows to heal or of candidates; or heal, if no row comes next."""
        if not self.needs_step:
            return self.heal(ROWS_PER_PASS) if self._healing is not None else None
        if self.needs_healing and (len(self.answer.ids) - 1) % self._interval == 0:
            assert self._healing is not None
            try:
                self._logits = self._healing.step(self.answer.ids, self._rows_beside(self._healing))
                self.passes += 1
                return None
            except Exception as error:
                self._survive(error)
        if candidates := self._candidates():
            self._compute_candidates(candidates)
        elif self._logits is None:
            self.take_logits(self._runner.decodes([self.answer.ids[-1]], [self.position], [self.buffer])[0])
        return None

    def take_logits(self, logits: Tensor) -> None:
        """Take the logits after the last token from a decode step that healed nothing."""
        self._logits = logits
        self.passes += 1
        if self._healing is not None:
            self._healing.note_step(self.answer.ids, logits)

    def heal(self, rows: int) -> None:
        """Heal at most so many rows in a pass of their own; or verify a finished draft, if the prompt is healed."""
        healing = self._healing
        assert healing is not None
        try:
            if not self.holds_back:
                healing.advance(self.answer.ids, rows)
            elif healing.prompt_left:
                healing.advance([], rows)  # the rows of a draft belong to its verification
            else:
                self._verify(healing)
        except Exception as error:
            self._survive(error)

    def _candidates(self) -> list[int]:
        """Return tokens that may follow the last one; none if nothing is known or rows cost too much."""
        if self._lookup is None:
            return []
        return self._lookup.candidates(self.answer.ids, self._params.max_new_tokens - len(self.answer.ids) - 1)

    def _compute_candidates(self, candidates: list[int]) -> None:
        """Compute the rows of the last token and of candidates after it; later rows replace those of wrong ones."""
        self.passes += 1
        lm, ids = self._runner.lm, [self.answer.ids[-1], *candidates]
        plan = RowsPlan.between(self.position, self.position + len(ids), lm.device, lm.sliding)
        self._logits, *further_logits = forward_logits(lm, torch.tensor(ids, device=lm.device), plan, self.buffer)
        self._ahead.extend(zip(candidates, further_logits, strict=True))

    def _logits_after(self, token: int) -> Tensor | None:
        """Return the logits after a token if it is the next candidate; otherwise drop all candidates."""
        if self._ahead and self._ahead[0][0] == token and self._lookup is not None:
            self._lookup.accept()
            return self._ahead.popleft()[1]
        self._ahead.clear()
        return None

    @property
    def _draft_is_complete(self) -> bool:
        """Whether there is a complete draft: it is long enough, or it has ended, or the prompt is healed."""
        if not self.holds_back:
            return False
        if not self._params.is_greedy or self._params.grammar is not None:
            return True
        assert self._healing is not None
        drafted = len(self.answer.ids) >= DRAFT_TOKENS or self.answer.finish_reason is not None
        return drafted or not self._healing.prompt_left

    def _mask(self) -> Mask | None:
        """Return the mask of full prefill's greedy tokens, by a state of its own in the grammar of the answer."""
        grammar = self._params.grammar
        return None if grammar is None else Constraint(self._runner.lm.grammar_vocabulary, grammar).mask_after

    def _rows_beside(self, healing: Healing) -> int:
        """Return how many rows to heal beside the next step.

        After the prompt, heal at least two rows for each step, because each step adds one row.
        """
        if self.holds_back:
            return min(self._rows, healing.prompt_left)
        return self._rows if healing.prompt_left else max(self._rows, 2 * self._interval)

    def _pace(self) -> tuple[int, int]:
        """Return the rows to heal beside a step, and the steps from one that heals to the next; no rows if none fit."""
        try:
            pace = self._runner.step_costs().pace(self._params.slowdown)
        except Exception as error:
            self._reason = f"nothing was healed: its costs could not be measured: {error}"
            return 0, 1
        if pace is None:
            self._reason = "nothing was healed: no token may take longer, since `slowdown` is 0"
            return 0, 1
        return pace.rows, pace.interval

    def _verify(self, healing: Healing) -> None:
        """Take the beginning of the draft that agrees with full prefill, and go on from there."""
        draft = self.answer.ids
        logits = healing.finish(draft)
        accepted = healing.verified(draft) or 0
        healing.shorten(draft[:accepted])
        self._drop_draft()
        self._accepted, self._logits = accepted, logits[accepted]
        for row, token in zip(logits, draft[:accepted], strict=False):  # there is a row after the last token, too
            self._note_logprob(row, token)
        self._verified_text = "".join(self.answer.push(token) for token in draft[:accepted])

    def _note_logprob(self, logits: Tensor, token: int) -> None:
        if self._params.logprobs is not None:
            self._logprobs.append(token_logprob(logits, token, self._params.logprobs))

    def _take_verified_text(self) -> str:
        text, self._verified_text = self._verified_text, ""
        return text

    def _drop_draft(self) -> None:
        self._drafted, self.holds_back = len(self.answer.ids), False
        self.answer = PartialAnswer(self._runner.lm, self._params)

    def _survive(self, error: Exception) -> None:
        """Stop healing after an error; compute the prompt of a draft in full, since its answer has to be exact."""
        LOG.warning("healing failed", exc_info=error)
        traceback.clear_frames(error.__traceback__)
        self._reason = f"healing failed: {error}"
        self._rows = 0
        if self.holds_back:
            assert self._healing is not None
            self._drop_draft()
            self._logits = self._healing.restart()
