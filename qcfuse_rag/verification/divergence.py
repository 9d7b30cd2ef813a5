"""Compare two caches: by the prediction of one token, or along full prefill's greedy answer.

Teacher forcing feeds a cache the tokens of a fixed answer and reads its prediction before each of them. Two caches that
predict along the same answer can so be compared at every token, not only at the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.completion import Detokenizer, end_tokens
from qcfuse_rag.runtime.forward import forward_logits
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan
from qcfuse_rag.runtime.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Divergence:
    """How two caches differ along the greedy answer over the first, before each token."""

    kl: tuple[float, ...]  # Kullback-Leibler divergence, in nats
    agrees: tuple[bool, ...]  # whether both caches predict the same most likely token

    @property
    def mean_kl(self) -> float:
        """Mean divergence along the answer, in nats a token."""
        return fmean(self.kl)

    @property
    def first_kl(self) -> float:
        """Divergence at the first token, in nats."""
        return self.kl[0]

    @property
    def top1(self) -> float:
        """Share of the tokens on which both caches agree."""
        return fmean(self.agrees)

    @property
    def identical(self) -> bool:
        """Whether all tokens agree.

        Then the greedy answer over the second cache is that over the first: by induction, each of its tokens is chosen
        after the same tokens. Predictions equal within rounding can make an exception.
        """
        return all(self.agrees)


def divergence(oracle: Tensor, other: Tensor) -> float:
    """Return the Kullback-Leibler divergence KL(oracle || other) of two `[vocabulary]` logits, in nats.

    It is NaN if logits are NaN.
    """
    if oracle.device.type == "mps":  # has no float64
        oracle, other = oracle.cpu(), other.cpu()
    log_p, log_q = oracle.double().log_softmax(-1), other.double().log_softmax(-1)
    p = log_p.exp()
    terms = (p * (log_p - log_q)).masked_fill(p == 0, 0.0)  # both logits of a token may be -inf
    return max(float(terms.sum()), 0.0)  # in this order, NaN stays NaN


def compare_answers(full: Tensor, other: Tensor) -> Divergence:
    """Compare two caches along the greedy answer over the first, by the `[N, vocabulary]` logits before its tokens."""
    kl = tuple(divergence(oracle, logits) for oracle, logits in zip(full, other, strict=True))
    return Divergence(kl, tuple((full.argmax(-1) == other.argmax(-1)).tolist()))


@torch.inference_mode()
def greedy_answers(
    runner: ModelRunner, prompts: Sequence[Prefilled], max_new_tokens: int
) -> list[tuple[tuple[int, ...], Tensor]]:
    """Decode the greedy answers of prefilled prompts together: a step reads the weights once for all of them.

    The rows of an answer are written to its buffer after the prompt, which has to have capacity for all tokens but the
    last. That is harmless to later answers over the same buffer: every pass computes these positions again before it
    reads them.

    Returns:
        For each prompt the `N` token ids up to and including the end token, and the `[N, vocabulary]` float32 logits
        before each.
    """
    ends = end_tokens(runner.lm)
    answers = [[int(prefilled.logits.argmax())] for prefilled in prompts]
    logits = [[prefilled.logits] for prefilled in prompts]
    while unfinished := [i for i, ids in enumerate(answers) if ids[-1] not in ends and len(ids) < max_new_tokens]:
        tokens = [answers[i][-1] for i in unfinished]
        positions = [len(prompts[i].prompt) + len(answers[i]) - 1 for i in unfinished]
        buffers = [prompts[i].buffer for i in unfinished]
        for i, after in zip(unfinished, runner.decodes(tokens, positions, buffers), strict=True):
            logits[i].append(after)
            answers[i].append(int(after.argmax()))
    return [(tuple(ids), torch.stack(rows)) for ids, rows in zip(answers, logits, strict=True)]


@torch.inference_mode()
def answer_logits(runner: ModelRunner, prefilled: Prefilled, ids: Sequence[int]) -> Tensor:
    """Return the `[N, vocabulary]` float32 logits before each token of a given answer over a prefilled prompt.

    They are computed in one pass (teacher forcing), which sums in another order than decode steps do, so they are equal
    within the rounding of the dtype. The first row is `prefilled.logits`.
    """
    if len(ids) < 2:
        return prefilled.logits[None][: len(ids)]
    lm, length = runner.lm, len(prefilled.prompt)
    plan = RowsPlan.between(length, length + len(ids) - 1, lm.device, lm.sliding)
    following = forward_logits(lm, torch.tensor(ids[:-1], device=lm.device), plan, prefilled.buffer)
    return torch.cat([prefilled.logits[None], following])


class Compared(NamedTuple):
    """The divergence along full prefill's answer, and the ids of a cache's own; None if it differs, not decoded."""

    divergence: Divergence
    ids: tuple[int, ...] | None


def answer_text(lm: LanguageModel, ids: Sequence[int]) -> str:
    """Return the text of an answer's tokens as streaming would give it, without surrounding white space."""
    detokenizer = Detokenizer(lm.tokenizer.backend_tokenizer, ())
    return ("".join(detokenizer.push(token) for token in ids) + detokenizer.flush()).strip()


def compare_greedy_answers(
    runner: ModelRunner,
    full: Sequence[tuple[tuple[int, ...], Tensor]],
    prefilled: Sequence[Prefilled],
    max_new_tokens: int,
    *,
    decode: bool = True,
) -> list[Compared]:
    """Compare the greedy answers of prefilled prompts with full prefill's, as `greedy_answers` returned them.

    An answer is identical if every token of full prefill's is predicted. Only the others are decoded, together, and
    only with `decode`.
    """
    divergences = [
        compare_answers(logits, answer_logits(runner, prompt, ids).to(logits.device))
        for (ids, logits), prompt in zip(full, prefilled, strict=True)
    ]
    answers: list[tuple[int, ...] | None] = [
        ids if divergence.identical else None for (ids, _), divergence in zip(full, divergences, strict=True)
    ]
    differing = [index for index, ids in enumerate(answers) if ids is None]
    if decode and differing:
        decoded = greedy_answers(runner, [prefilled[index] for index in differing], max_new_tokens)
        for index, (ids, _) in zip(differing, decoded, strict=True):
            answers[index] = ids
    return list(map(Compared, divergences, answers))
