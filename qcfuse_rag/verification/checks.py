"""The prompts that a method is verified on, and the checks of its answers to them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from qcfuse_rag.bundled import corpus
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.ingestion.neighbours import nearest_chunks, token_vectors
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.prefill_base import Base
from qcfuse_rag.verification.divergence import AnswerDivergence
from qcfuse_rag.verification.ruler import generate
from qcfuse_rag.verification.samples import Example
from qcfuse_rag.verification.verdict import Check

PASSAGES_PER_CASE = 4
"""Passages in a prompt of `passage_cases`."""
OPENING_WORDS = 8
PASSAGE_ANSWER_TOKENS = 24
"""Tokens of an answer to a prompt of `passage_cases` that are compared."""


class Engine(Protocol):
    """What verification needs of a `FusionEngine`, which imports this package."""

    lm: LanguageModel
    store: KVStore
    runner: ModelRunner
    prompts: PromptBuilder

    def over(self, store: KVStore, method: Method) -> Engine:
        """Return an engine of the same model and wording over another store."""

    def warm(self, texts: Iterable[str], *, bases: Iterable[Base] | None = None, others: Iterable[str] = ()) -> object:
        """Prefill passages into the store; `others` may be their neighbours."""

    def prompt(self, question: str, passages: Sequence[str] = ()) -> Prompt:
        """Assemble a prompt."""

    def prefill(self, prompt: Prompt, *, method: Method | None = None, answer_tokens: int = 0) -> Prefilled:
        """Bring a prompt to its first token."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt on which a method's answer is compared with full prefill's.

    Attributes:
        question: the question.
        passages: the retrieved passages.
        max_new_tokens: tokens of the answer to compare.
        expected: strings that a right answer contains; empty if they are not known.
    """

    question: str
    passages: tuple[str, ...]
    max_new_tokens: int
    expected: tuple[str, ...] = ()


def ruler_cases(engine: Engine, task: str, size: int, tokens: int, texts: Sequence[str] = ()) -> list[Case]:
    """Build cases of a RULER-style task, see `verification.ruler`, in prompts of `tokens` tokens with the answer.

    Numbers are hidden in `texts`, by default the demonstration's.
    """
    examples = ruler_examples(engine, task, size, tokens, list(texts) or list(corpus().values()))
    return [
        Case(example.question, example.passages, min(example.max_new_tokens, 64), example.answers)
        for example in examples
    ]


def ruler_examples(
    engine: Engine, task: str, size: int, tokens: int, haystack: Sequence[str], seed: int = 0
) -> list[Example]:
    """Generate a RULER-style task for an engine's tokenizer and prompt template, see `verification.ruler`."""
    tokenizer = engine.lm.tokenizer.backend_tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    overhead = len(engine.prompt("", ()))
    return generate(task, size, tokens=tokens, count=count, haystack=haystack, seed=seed, overhead_tokens=overhead)


def passage_cases(engine: Engine, texts: Sequence[str], size: int) -> list[Case]:
    """Build cases of passages that are likely to be retrieved together.

    The question is about the opening words of one of the passages. There is no known answer.
    """
    unique = list(dict.fromkeys(texts))
    vectors = token_vectors(engine.lm, [engine.prompts.chunk_ids(text) for text in unique])
    related = nearest_chunks(vectors, PASSAGES_PER_CASE - 1)
    step = max(1, len(unique) // size)
    cases = []
    for index in range(0, len(unique), step)[:size]:
        opening = " ".join(unique[index].split()[:OPENING_WORDS])
        passages = [unique[neighbour] for neighbour in reversed(related[index])] + [unique[index]]
        cases.append(Case(f"What do the passages say about this: {opening}?", tuple(passages), PASSAGE_ANSWER_TOKENS))
    return cases


def fit_cases(texts: Sequence[str], size: int) -> list[Case]:
    """Build cases of random passages; the same arguments give the same cases.

    The question is about some words in the middle of one of the passages, which no case of `passage_cases` asks about.
    """
    unique = [text for text in dict.fromkeys(texts) if text.strip()]
    draw, cases = random.Random(0), []
    for _ in range(size if len(unique) > 1 else 0):
        passages = draw.sample(unique, min(PASSAGES_PER_CASE, len(unique)))
        words = draw.choice(passages).split()
        start = draw.randrange(OPENING_WORDS, max(OPENING_WORDS + 1, len(words) - OPENING_WORDS))
        asked = " ".join(words[start : start + OPENING_WORDS]) or " ".join(words)
        cases.append(Case(f"What do the passages say about this: {asked}?", tuple(passages), PASSAGE_ANSWER_TOKENS))
    return cases


def string_match(answer: str, gold: Sequence[str], *, needs_all: bool) -> float:
    """Score an answer by the gold answers that are its substrings, whatever their case.

    With `needs_all` it is the share of gold answers found, RULER's `string_match_all`; else 1 if any of them is found.
    """
    matches = [text.strip().lower() in answer.lower() for text in gold]
    return sum(matches) / len(matches) if needs_all else float(any(matches))


@dataclass(frozen=True, slots=True)
class VerifyLimits:
    """Limits that a method must keep to pass. They are this project's choice; no paper states limits.

    Attributes:
        kl: highest mean divergence from full prefill along its answers, in nats a token.
        agreement: lowest share of the tokens of full prefill's answers that the method predicts.
        loss: largest drop in the share of hidden answers found, compared with full prefill, from 0 to 1.
    """

    kl: float = 0.25
    agreement: float = 0.75
    loss: float = 0.1


@dataclass(frozen=True, slots=True)
class Comparison:
    """A method's answer to one prompt beside full prefill's.

    Attributes:
        divergence: along full prefill's greedy answer.
        score: share of the expected strings in the method's answer.
        full_score: share of the expected strings in full prefill's answer.
    """

    divergence: AnswerDivergence
    score: float
    full_score: float


def answer_checks(comparisons: Mapping[str, Sequence[Comparison]], limits: VerifyLimits) -> list[Check]:
    """Check a method's answers by kind of case; every prompt counts the same, however long its answer.

    Args:
        comparisons: at least one for each kind; the kinds `needle` and `multi-hop` have expected strings.
        limits: the limits of the checks.
    """
    everything = [comparison.divergence for group in comparisons.values() for comparison in group]
    answers = f"full prefill's answers to {len(everything)} prompts"
    kl = fmean(divergence.mean_kl for divergence in everything)
    top1 = fmean(divergence.top1 for divergence in everything)
    identical = fmean(divergence.identical for divergence in everything)
    return [
        Check("kl", kl, limits.kl, False, f"divergence along {answers}, nats a token"),
        Check("top-1", top1, limits.agreement, True, f"share of the tokens of {answers} that are predicted"),
        Check("identical", identical, None, True, f"share of {answers} that are the same word for word; no limit"),
        *(_loss_check(kind, comparisons[kind], limits.loss) for kind in ("needle", "multi-hop")),
    ]


def _loss_check(kind: str, group: Sequence[Comparison], limit: float) -> Check:
    full = fmean(comparison.full_score for comparison in group)
    fused = fmean(comparison.score for comparison in group)
    detail = f"hidden answers found in {len(group)} prompts: full prefill {full:.0%}, fused {fused:.0%}"
    if not full:
        detail += "; the model cannot solve this task at all, so the check says nothing about the method"
    return Check(kind, max(0.0, full - fused), limit, False, detail)
