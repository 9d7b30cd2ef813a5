"""Compare greedy answers with full prefill's: along full prefill's tokens, and by the answers that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.detokenizer import Detokenizer
from qcfuse_rag.generation.teacher_forcing import answer_logits, greedy_answers
from qcfuse_rag.monitoring.divergence import AnswerDivergence, compare_answers
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.runner import ModelRunner

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
