"""Compare two predictions: of the first token, or of every token along an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.detokenizer import Detokenizer
from qcfuse_rag.generation.teacher_forcing import answer_logits, greedy_answers
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class AnswerDivergence:
    """How two caches differ along the greedy answer over the first, at every token.

    Attributes:
        kl: Kullback-Leibler divergence before each token, in nats.
        agrees: whether both caches predict the same most likely token, before each token.
    """

    kl: tuple[float, ...]
    agrees: tuple[bool, ...]

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

    def summary(self) -> dict[str, float]:
        """Return the mean divergence as `answer_kl`, `first_kl`, `top1`, and `identical` as 0 or 1."""
        return {
            "answer_kl": self.mean_kl,
            "first_kl": self.first_kl,
            "top1": self.top1,
            "identical": float(self.identical),
        }


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


def compare_answers(full: Tensor, other: Tensor) -> AnswerDivergence:
    """Compare two caches along the greedy answer over the first.

    Args:
        full: `[N, vocabulary]` logits before each token of the answer, N at least 1, usually over full prefill's cache.
        other: `[N, vocabulary]` logits before each token of the same answer over the other cache.

    Raises:
        ValueError: if the shapes differ or there is no token.
    """
    if full.shape != other.shape or not len(full):
        raise ValueError(f"compare logits of the same answer, not of shapes {[*full.shape]} and {[*other.shape]}")
    kl = tuple(divergence(oracle, logits) for oracle, logits in zip(full, other, strict=True))
    return AnswerDivergence(kl, tuple((full.argmax(-1) == other.argmax(-1)).tolist()))


GreedyAnswer = tuple[tuple[int, ...], Tensor]
"""Token ids of a greedy answer, and `[N, vocabulary]` float32 logits before each; see `greedy_answers`."""


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """The greedy answer over a cache beside full prefill's.

    Attributes:
        divergence: along full prefill's greedy answer.
        ids: token ids of the answer; None if it differs and was not decoded.
    """

    divergence: AnswerDivergence
    ids: tuple[int, ...] | None


def answer_text(lm: LanguageModel, ids: Sequence[int]) -> str:
    """Return the text of an answer's tokens as streaming would give it, without surrounding white space."""
    detokenizer = Detokenizer(lm.tokenizer.backend_tokenizer, ())
    return ("".join(detokenizer.push(token) for token in ids) + detokenizer.flush()).strip()


def compare_greedy_answers(
    runner: ModelRunner,
    full: Sequence[GreedyAnswer],
    prefilled: Sequence[Prefilled],
    max_new_tokens: int,
    *,
    decode: bool = True,
) -> list[ComparedAnswer]:
    """Compare the greedy answers of prefilled prompts with full prefill's.

    An answer is identical if every token of full prefill's is predicted. Only the others are decoded, together.

    Args:
        runner: the model.
        full: full prefill's answer to each prompt.
        prefilled: the prompts, with capacity for `max_new_tokens`.
        max_new_tokens: limit of the answers, at least 1.
        decode: whether to decode answers that differ.
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
    return [ComparedAnswer(divergence, ids) for divergence, ids in zip(divergences, answers, strict=True)]
