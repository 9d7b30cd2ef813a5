"""Scores of an answer, from 0 to 1: token F1, exact match, ROUGE-L and string match."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.verification.cases import string_match

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return a text as SQuAD and LongBench compare it: lower case, no punctuation, no articles, single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def comparable(text: str) -> str:
    """Return a text normalised, or stripped in lower case if nothing is left of it: `:` must not equal `/`."""
    return normalized(text) or text.strip().lower()


def token_f1(answer: str, gold: Sequence[str]) -> float:
    """Return the F1 of the bags of normalised words, the best over the gold answers."""
    return max(_word_f1(comparable(answer).split(), comparable(expected).split()) for expected in gold)


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """Return 1 if the normalised answer is a normalised gold answer, else 0."""
    return float(any(comparable(answer) == comparable(expected) for expected in gold))


def rouge_l(answer: str, gold: Sequence[str]) -> float:
    """Return the F-measure of ROUGE-L with stemming, by `rouge-score`, the best over the gold answers."""
    return max(float(rouge_scorer().score(expected, answer)["rougeL"].fmeasure) for expected in gold)


def scores(answer: str, gold: Sequence[str], *, needs_all: bool = False) -> dict[str, float]:
    """Return all scores by their names in a record.

    With `needs_all` the gold answers are parts of one answer; words are compared with all of them, see `string_match`.
    """
    answers = [", ".join(gold)] if needs_all else gold
    return {
        "f1": token_f1(answer, answers),
        "em": exact_match(answer, answers),
        "rouge_l": rouge_l(answer, answers),
        "match": string_match(answer, gold, needs_all=needs_all),
    }


@cache
def rouge_scorer() -> Any:
    """Return the scorer of `rouge-score`."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise QCFuseError('the quality bench needs rouge-score; run `pip install "qcfuse-rag[bench]"`') from error
    return RougeScorer(["rougeL"], use_stemmer=True)


def _word_f1(answer: list[str], gold: list[str]) -> float:
    shared = sum((Counter(answer) & Counter(gold)).values())
    return 2 * shared / (len(answer) + len(gold)) if shared else 0.0
