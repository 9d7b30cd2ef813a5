"""Build the cases of a verification: hidden numbers, chains of variables, and the user's passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.ingestion.neighbours import nearest_chunks, token_vectors
from qcfuse_rag.verification.ruler import generate

PASSAGES_PER_CASE = 4
"""Passages in a prompt of `passage_cases`."""

OPENING_WORDS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt on which a method is compared with full prefill.

    Attributes:
        question: the question.
        passages: in the order of the prompt.
        expected: strings that a right answer contains; empty if only the first token is compared.
        max_new_tokens: length limit of the answer.
    """

    question: str
    passages: tuple[str, ...]
    expected: tuple[str, ...] = ()
    max_new_tokens: int = 0


def ruler_cases(engine: FusionEngine, task: str, size: int, tokens: int, texts: Sequence[str] = ()) -> list[Case]:
    """Build cases of a RULER-style task, see `verification.ruler`, in prompts of `tokens` tokens with the answer.

    Numbers are hidden in `texts`, by default the demonstration's.
    """
    tokenizer = engine.lm.tokenizer.backend_tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    overhead = len(engine.prompt("", ()))
    haystack = list(texts) or list(corpus().values())
    examples = generate(task, size, tokens=tokens, count=count, haystack=haystack, seed=0, overhead_tokens=overhead)
    return [
        Case(example.question, example.passages, example.answers, min(example.max_new_tokens, 64))
        for example in examples
    ]


def passage_cases(engine: FusionEngine, texts: Sequence[str], size: int) -> list[Case]:
    """Build cases of passages that are likely to be retrieved together.

    The question is about the opening words of one of the passages. There is no known answer: the method's first token
    is compared with full prefill's.
    """
    unique = list(dict.fromkeys(texts))
    vectors = token_vectors(engine.lm, [engine.prompts.chunk_ids(text) for text in unique])
    related = nearest_chunks(vectors, PASSAGES_PER_CASE - 1)
    step = max(1, len(unique) // size)
    cases = []
    for index in range(0, len(unique), step)[:size]:
        opening = " ".join(unique[index].split()[:OPENING_WORDS])
        passages = [unique[neighbour] for neighbour in reversed(related[index])] + [unique[index]]
        cases.append(Case(f"What do the passages say about this: {opening}?", tuple(passages)))
    return cases


def string_match(answer: str, gold: Sequence[str], *, needs_all: bool) -> float:
    """Score an answer by the gold answers that are its substrings; case does not matter.

    With `needs_all` it is the share of gold answers in the answer, RULER's `string_match_all`; else 1 if any of them
    is.
    """
    matches = [text.strip().lower() in answer.lower() for text in gold]
    return sum(matches) / len(matches) if needs_all else float(any(matches))
