"""What a method is verified on: hidden numbers, chains of variables, and the user's own passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.ingestion.neighbours import nearest, token_vectors
from qcfuse_rag.verification.ruler import generate

TOGETHER = 4
"""Passages of a prompt made of the user's own."""

OPENING_WORDS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt to compare a method with full prefill on.

    Attributes:
        question: the question.
        passages: in order.
        expected: strings that a right answer holds; empty if only the first token is compared.
        max_new_tokens: of the answer.
    """

    question: str
    passages: tuple[str, ...]
    expected: tuple[str, ...] = ()
    max_new_tokens: int = 0


def hidden(engine: FusionEngine, task: str, size: int, tokens: int, texts: Sequence[str] = ()) -> list[Case]:
    """Make RULER-style cases, see `verification.ruler`.

    Args:
        engine: for its tokenizer and the wording of its prompts.
        task: `ruler_mv`, numbers hidden in text, or `ruler_vt`, a chain of variables to follow.
        size: how many.
        tokens: length of a prompt with its answer.
        texts: to hide numbers in; the demonstration's if there are none.
    """
    tokenizer = engine.lm.tokenizer.backend_tokenizer

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    prefix_ids = len(engine.prompt("", ()))
    haystack = list(texts) or list(corpus().values())
    made = generate(task, size, tokens=tokens, count=count, haystack=haystack, seed=0, prefix_ids=prefix_ids)
    return [Case(one.question, one.passages, one.answers, min(one.max_new_tokens, 64)) for one in made]


def own(engine: FusionEngine, texts: Sequence[str], size: int) -> list[Case]:
    """Make cases of passages that are likely to be retrieved together.

    What is asked is what a passage says of its own opening words. What the right answer is nobody knows; full prefill's
    first token is what the method's is compared with.

    Args:
        engine: whose embeddings say which passages are related.
        texts: passages.
        size: how many cases.
    """
    kept = list(dict.fromkeys(texts))
    related = nearest(token_vectors(engine.lm, [engine.prompts.chunk_ids(text) for text in kept]), TOGETHER - 1)
    step = max(1, len(kept) // size)
    cases = []
    for index in range(0, len(kept), step)[:size]:
        opening = " ".join(kept[index].split()[:OPENING_WORDS])
        passages = [kept[other] for other in reversed(related[index])] + [kept[index]]
        cases.append(Case(f"What do the passages say about this: {opening}?", tuple(passages)))
    return cases


def string_match(answer: str, gold: Sequence[str], *, needs_all: bool) -> float:
    """Return how far gold answers are substrings of the answer, upper and lower case alike.

    Args:
        answer: the answer.
        gold: gold answers.
        needs_all: return the share of them that is found, RULER's `string_match_all`; else 1 if any is.
    """
    found = [one.strip().lower() in answer.lower() for one in gold]
    return sum(found) / len(found) if needs_all else float(any(found))
