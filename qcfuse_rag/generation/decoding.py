"""Continue a prefilled prompt token by token, in one of two ways: `fast` or `exact`.

`fast` decodes over the fused cache; the rows of candidates for the next tokens are computed beside steps. `exact`
drafts tokens on the fused cache while it is healed, and holds them back. When the prompt is healed, one pass verifies
the draft. Its agreeing beginning becomes the answer, which goes on over the exact cache. An answer that is sampled, has
penalties or follows a grammar is not drafted: its first token comes when the prompt is healed.

Prompt lookup decoding (Saxena, 2023) guesses an answer's next tokens from what followed its last tokens before. One
pass computes the row of the last token and those of some candidates after it. A budget limits the candidates: each step
without candidates adds a tenth of a step, up to `CREDIT` steps. Candidates spend the cost of their rows, and an
accepted candidate adds one step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.fusion.healing import Healing
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.completion import Completion, FinishReason, TokenLogprob, content_logprobs, token_logprob
from qcfuse_rag.generation.sampling import Constraint, Sampler
from qcfuse_rag.generation.sampling_params import Fidelity, SamplingParams
from qcfuse_rag.models.cpu_weights import multiplies
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.forward import forward_logits
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner

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
        for stop in range(max(1, self._known), len(self._ids)):
            for size in NGRAM_SIZES:
                if stop >= size:
                    self._next_index[tuple(self._ids[stop - size : stop])] = stop
        self._known = len(self._ids)
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


def prompt_lookup(lm: LanguageModel, prompt: Sequence[int], max_tokens: int | None) -> PromptLookup | None:
    """Return the lookup of one answer; None on GPUs, whose steps are recorded for single rows.

    `max_tokens` are the most candidates of a pass; None chooses by the cost of rows, 0 turns the lookup off.
    """
    if lm.device.type != "cpu" or max_tokens == 0:
        return None
    row_cost = BFLOAT16_ROW_COST if lm.dtype == torch.bfloat16 and multiplies("bfloat16") else ROW_COST
    return PromptLookup(prompt, max_tokens or min(MAX_TOKENS, round(LONGEST_COST / row_cost)), row_cost)


LOG = logging.getLogger(__name__)

DRAFT_TOKENS = 32
"""Most tokens that `exact` drafts before it verifies them; VeriCache drafts 25 to 40."""
ROWS_PER_PASS = 256
"""Rows of a pass that only heals: between two of them a request can be cancelled."""
FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
"""OpenAI's name for each way in which an answer without tool calls ends."""


@dataclass(frozen=True, slots=True)
class HealingReport:
    """The work and outcome of healing for one answer.

    Attributes:
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


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts: prompt, answer, reused from the store or an earlier request, recomputed although stored."""

    input_tokens: int
    output_tokens: int
    reused_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        ids: its tokens, the end token included.
        finish_reason: `end` for an end token, `stop` for a stop string or a new turn of the
            prompt's wording, `length` for the token limit, or `cancelled`.
        decode_s: seconds from the first token's logits to the last token; of a stream, from the first read on.
        healing: what healing did for `exact`; None for `fast`.
        logprobs: of the tokens, one for each id; None if the request asked for none.
        passes: number of decode passes, see `Decoder`; fewer than tokens where candidates were right.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    report: FusionReport
    decode_s: float
    healing: HealingReport | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    passes: int = 0

    @property
    def verified_upto(self) -> int | None:
        """Number of leading tokens known to be full prefill's greedy tokens; None if nothing was verified."""
        return None if self.healing is None else self.healing.verified_upto

    @property
    def usage(self) -> Usage:
        """Token counts of the request."""
        report = self.report
        return Usage(report.prompt_tokens, len(self.ids), report.reused_tokens, len(report.selected))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "text": self.text,
            "tokens": len(self.ids),
            "finish_reason": self.finish_reason,
            "decode_s": self.decode_s,
            "passes": self.passes,
            "usage": asdict(self.usage),
            "verified_upto": self.verified_upto,
            "healing": None if self.healing is None else asdict(self.healing),
            "logprobs": None if self.logprobs is None else [asdict(token) for token in self.logprobs],
            "report": self.report.to_dict(),
        }

    def content_logprobs(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]] | None:
        """Return the logarithmic probabilities in OpenAI's format, but for the end token; None without them."""
        if self.logprobs is None:
            return None
        return content_logprobs(self.logprobs[: -1 if self.finish_reason == "end" else None], tokenizer)


def make_decoder(runner: ModelRunner, prefilled: Prefilled, params: SamplingParams, sampler: Sampler) -> Decoder:
    """Return the decoder for the fidelity that a request asks for."""
    kind = ExactDecoder if params.fidelity == "exact" else Decoder
    return kind(runner, prefilled, params, sampler)


class Decoder:
    """Decodes one answer over the cache as it is.

    `choose` and `compute` take turns until there is a `finish_reason`. A scheduler may compute the steps of several
    answers together instead, see `needs_step` and `take_logits`.
    """

    def __init__(self, runner: ModelRunner, prefilled: Prefilled, params: SamplingParams, sampler: Sampler) -> None:
        self._runner, self._prefilled, self._params, self._sampler = runner, prefilled, params, sampler
        self._logits: Tensor | None = prefilled.logits
        self._logprobs: list[TokenLogprob] = []
        self._lookup = None
        if params.fidelity == "fast":
            self._lookup = prompt_lookup(runner.lm, prefilled.prompt.ids, params.prompt_lookup_num_tokens)
        self._ahead: deque[tuple[int, Tensor]] = deque()  # candidates with the logits after them
        self.completion = Completion(runner.lm, params, prefilled.prompt)  # while it is held back, the draft
        self.holds_back = False  # whether the answer is a draft that waits for verification
        self.passes = 0  # over the answer's tokens; those that heal and verify are not counted

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is finished; None before that, and for a draft."""
        return None if self.holds_back else self.completion.finish_reason

    @property
    def position(self) -> int:
        """Position of the last token."""
        return len(self._prefilled.prompt) + len(self.completion.ids) - 1

    @property
    def buffer(self) -> KVBuffer:
        """Keys and values of prompt and answer."""
        return self._prefilled.buffer

    @property
    def needs_step(self) -> bool:
        """Whether the next pass computes the last token's row."""
        return self._logits is None

    @property
    def verified_upto(self) -> int | None:
        """Number of leading answer tokens known to be full prefill's greedy tokens; None if nothing is verified yet."""
        return None

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The log probabilities of the answer's tokens so far, without a draft's; None if the request asks for none."""
        return None if self._params.logprobs is None else tuple(self._logprobs)

    def choose(self) -> str:
        """Choose the next token, if its logits are there; return the text that is now certain, often empty."""
        if self._logits is None or self.completion.finish_reason is not None:
            return ""
        token = self._sampler(self._logits, self._prefilled.prompt.ids, self.completion.ids)
        self._note_logprob(self._logits, token)
        self._logits = self._logits_after(token)
        return self.completion.push(token)

    def compute(self) -> None:
        """Compute the last token's row, with rows of candidates where some are known."""
        if not self.needs_step:
            return
        ids = self.completion.ids
        left = self._params.max_new_tokens - len(ids) - 1
        if self._lookup is not None and (candidates := self._lookup.candidates(ids, left)):
            self._compute_candidates(candidates)
        else:
            began = time.perf_counter()
            self.take_logits(self._runner.decodes([ids[-1]], [self.position], [self.buffer])[0])
            if self._runner.lm.device.type == "cpu":  # elsewhere the host is ahead
                self._runner.costs.observe_pass(1, self.position, time.perf_counter() - began)

    def take_logits(self, logits: Tensor) -> None:
        """Take the logits after the last token from a decode step that healed nothing."""
        self._logits = logits
        self.passes += 1

    def cancel(self) -> str:
        """End the answer and drop a draft; return the text that was certain and not yet returned."""
        self.completion.finish_reason = "cancelled"
        return ""

    def finish(self, decode_s: float) -> Generation:
        """Return the finished answer, and keep its keys and values, but for the last token's, for later prompts."""
        completion, reason = self.completion, self.finish_reason
        assert reason is not None
        self._runner.costs.save()
        lease, computed = self._prefilled.lease, completion.ids[:-1]
        if lease is not None:
            try:
                prompt = self._prefilled.prompt
                lease.put(prompt, computed, self.buffer, min(self._exact_positions(), len(prompt) + len(computed)))
            except Exception as error:  # such as memory that is used up; the answer is complete
                LOG.warning("the answer's keys and values were not cached: %s", error)
        answer = completion.text, tuple(completion.ids), reason, self._prefilled.report, decode_s
        return Generation(*answer, self.healing_report(), self.logprobs, self.passes)

    def healing_report(self) -> HealingReport | None:
        """Return what healing did so far; None for `fast`."""
        return None

    def _exact_positions(self) -> int:
        exact = self._prefilled.exact_tokens
        return exact if exact < len(self._prefilled.prompt) else exact + len(self.completion.ids)

    def _compute_candidates(self, candidates: list[int]) -> None:
        # Later rows replace those of wrong candidates.
        self.passes += 1
        lm, ids = self._runner.lm, [self.completion.ids[-1], *candidates]
        plan = RowsPlan.between(self.position, self.position + len(ids), lm.device, lm.sliding)
        self._logits, *further_logits = forward_logits(lm, torch.tensor(ids, device=lm.device), plan, self.buffer)
        self._ahead.extend(zip(candidates, further_logits, strict=True))

    def _logits_after(self, token: int) -> Tensor | None:
        if self._ahead and self._ahead[0][0] == token and self._lookup is not None:
            self._lookup.accept()
            return self._ahead.popleft()[1]
        self._ahead.clear()
        return None

    def _note_logprob(self, logits: Tensor, token: int) -> None:
        if self._params.logprobs is not None:
            self._logprobs.append(token_logprob(logits, token, self._params.logprobs))


class ExactDecoder(Decoder):
    """Drafts an answer while the prompt is healed, and verifies it before any of it is shown."""

    def __init__(self, runner: ModelRunner, prefilled: Prefilled, params: SamplingParams, sampler: Sampler) -> None:
        super().__init__(runner, prefilled, params, sampler)
        mask = None  # of full prefill's greedy tokens, by a state of its own in the grammar of the answer
        if params.grammar is not None:
            mask = Constraint(runner.lm.grammar_vocabulary, params.grammar).mask_after
        self._healing = Healing(runner, prefilled, mask)
        self._reason: str | None = None
        self._verified_text = ""
        self._drafted = self._accepted = 0
        left = len(prefilled.prompt) - prefilled.exact_tokens
        self._rows_beside_step = math.ceil(left / DRAFT_TOKENS)
        self.holds_back = left > 0
        if self._draft_is_complete:
            self._logits = None

    @property
    def buffer(self) -> KVBuffer:
        return self._healing.buffer

    @property
    def needs_step(self) -> bool:
        """Whether the next pass computes the last token's row; it does not while a finished draft is verified."""
        return super().needs_step and not self._draft_is_complete

    @property
    def verified_upto(self) -> int | None:
        if self.holds_back or not self._params.is_greedy:
            return None
        return self._healing.verified(self.completion.ids)

    def choose(self) -> str:
        text, self._verified_text = self._verified_text, ""
        piece = super().choose()
        return text if self.holds_back else text + piece

    def compute(self) -> None:
        """Compute the last token's row, of a draft beside rows to heal; or heal, if no row comes next."""
        if not self.holds_back:
            super().compute()
        elif not self.needs_step:
            self.heal(ROWS_PER_PASS)
        else:
            try:
                self._logits = self._healing.step(self.completion.ids, self._rows_beside_step)
                self.passes += 1
            except Exception as error:
                self._survive(error)

    def take_logits(self, logits: Tensor) -> None:
        super().take_logits(logits)
        self._healing.note_step(self.completion.ids, logits)

    def heal(self, rows: int) -> None:
        """Heal at most so many rows in a pass of their own; or verify the draft, if the prompt is healed."""
        try:
            if self._healing.prompt_left:
                self._healing.advance(rows)  # the rows of a draft belong to its verification
            else:
                self._verify()
        except Exception as error:
            self._survive(error)

    def cancel(self) -> str:
        if self.holds_back:
            self._drop_draft()
        return super().cancel() + self._verified_text

    def healing_report(self) -> HealingReport | None:
        length = len(self._prefilled.prompt)
        exact, reason = min(self._healing.healed, length), self._reason
        if reason is None and self._healing.prompt_left:
            reason = f"the answer ended when {exact:,} of {length:,} prompt tokens were exact"
        drafted, accepted = self._drafted, self._accepted
        return HealingReport(self._params.fidelity, length, exact, self.verified_upto, drafted, accepted, reason)

    def _exact_positions(self) -> int:
        return self._healing.healed

    @property
    def _draft_is_complete(self) -> bool:
        if not self.holds_back:
            return False
        if not self._params.is_greedy or self._params.grammar is not None:
            return True
        drafted = len(self.completion.ids) >= DRAFT_TOKENS or self.completion.finish_reason is not None
        return drafted or not self._healing.prompt_left

    def _verify(self) -> None:
        draft = self.completion.ids
        logits = self._healing.finish(draft)
        accepted = self._healing.verified(draft) or 0
        self._healing.shorten(draft[:accepted])
        self._drop_draft()
        self._accepted, self._logits = accepted, logits[accepted]
        for row, token in zip(logits, draft[:accepted], strict=False):  # there is a row after the last token, too
            self._note_logprob(row, token)
        self._verified_text = "".join(self.completion.push(token) for token in draft[:accepted])

    def _note_logprob(self, logits: Tensor, token: int) -> None:
        if not self.holds_back:
            super()._note_logprob(logits, token)

    def _drop_draft(self) -> None:
        self._drafted, self.holds_back = len(self.completion.ids), False
        self.completion = Completion(self._runner.lm, self._params, self._prefilled.prompt)

    def _survive(self, error: Exception) -> None:
        """Compute the prompt of a draft in full after an error, since its answer has to be exact."""
        LOG.warning("healing failed", exc_info=error)
        traceback.clear_frames(error.__traceback__)
        self._reason = f"healing failed: {error}"
        self._drop_draft()
        self._logits = self._healing.restart()


class TextStream(Iterator[str]):
    """A streamed answer: iterate for pieces of text, then read `generation`.

    To abandon the answer, stop iterating; nothing runs in the background. `cancel` ends it before its next token.

    Attributes:
        report: of the prefill; available at once.
        generation: the finished answer; None until the last piece was read.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prefilled: Prefilled,
        params: SamplingParams,
        *,
        cancel: threading.Event | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.report, self._prefilled = prefilled.report, prefilled
        self.generation: Generation | None = None
        self._decoder = make_decoder(runner, prefilled, params, sampler or Sampler(params, runner.lm))
        self._pieces = self._decode(cancel or threading.Event())

    @property
    def prefilled(self) -> Prefilled:
        """The prompt with keys and values of prompt and answer, as far as they are healed.

        They take memory as long as the stream exists.
        """
        return replace(self._prefilled, buffer=self._decoder.buffer)

    @property
    def verified_upto(self) -> int | None:
        """Number of leading tokens so far that are known to be full prefill's greedy tokens; None if nothing is yet."""
        return self._decoder.verified_upto

    def __next__(self) -> str:
        return next(self._pieces)

    def result(self) -> Generation:
        """Read all remaining pieces and return the answer."""
        for _ in self:
            pass
        assert self.generation is not None
        return self.generation

    def _decode(self, cancel: threading.Event) -> Iterator[str]:
        started, decoder = time.perf_counter(), self._decoder
        while True:
            piece = decoder.cancel() if cancel.is_set() else decoder.choose()
            if piece:
                yield piece
            if decoder.finish_reason is not None:
                break
            decoder.compute()
        if last_piece := decoder.completion.finish():
            yield last_piece
        self.generation = decoder.finish(time.perf_counter() - started)
