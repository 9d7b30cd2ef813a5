"""Scores of answers, and their means with intervals.

The performance gap recovered (PGR) is KVShareArena's (github.com/xishi404/KVShareArena).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from qcfuse_rag.verification.cases import string_match

RESAMPLES = 10_000
ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def comparable(text: str) -> str:
    """Return a text as SQuAD and LongBench compare it: lower case, no punctuation, no articles, single spaces.

    If nothing is left of it, it is only stripped: `:` must not equal `/`.
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()) or text.strip().lower()


def token_f1(answer: str, gold: Sequence[str]) -> float:
    """Return the F1 of the bags of normalised words, the best over the gold answers."""
    return max(_word_f1(comparable(answer).split(), comparable(expected).split()) for expected in gold)


def scores(answer: str, gold: Sequence[str], *, needs_all: bool = False) -> dict[str, float]:
    """Return all scores by their names in a record.

    With `needs_all` the gold answers are parts of one answer; words are compared with all of them, see `string_match`.
    """
    answers = [", ".join(gold)] if needs_all else gold
    return {"f1": token_f1(answer, answers), "match": string_match(answer, gold, needs_all=needs_all)}


def _word_f1(answer: list[str], gold: list[str]) -> float:
    shared = sum((Counter(answer) & Counter(gold)).values())
    return 2 * shared / (len(answer) + len(gold)) if shared else 0.0


def mean_interval(values: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Return `mean` and the 2.5 % and 97.5 % quantiles, `low` and `high`, of the means of 10,000 resamples.

    The resamples depend on the seed and the number of values alone.
    """
    sample = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(_weights(len(sample), seed) @ sample, [0.025, 0.975])
    return {"mean": float(sample.mean()), "low": float(low), "high": float(high)}


def format_interval(interval: Mapping[str, float]) -> str:
    """Write a difference of means with its interval."""
    return f"{interval['mean']:+.3f} [{interval['low']:+.3f}, {interval['high']:+.3f}]"


@lru_cache(maxsize=8)
def _weights(count: int, seed: int) -> NDArray[np.float64]:
    """Return `[10000, count]`: the share of each question in each resample."""
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return drawn / count


LOW, HIGH = 249, 9749  # ranks, from 0, of the ends of a 95 % interval among all resamples
LEAST_GAP = 1e-3  # PGR is undefined if full prefill's mean score is above that without passages by at most this


def gap_recovered(
    method: Sequence[float], without_passages: Sequence[float], full: Sequence[float], seed: int = 0
) -> dict[str, float | None]:
    """Return the PGR of mean scores, None where undefined, and its 95 % interval over questions.

    Scores are in the same order of questions. The interval is None if PGR is undefined in more than 2.5 % of the
    resamples, whose share is `pgr_undefined`: these questions cannot tell.
    """
    gap = fmean(full) - fmean(without_passages)
    weights = _weights(len(full), seed)
    means = [weights @ np.asarray(scores, np.float64) for scores in (method, without_passages, full)]
    gaps = means[2] - means[1]
    defined = gaps > LEAST_GAP
    values = np.sort((means[0] - means[1])[defined] / gaps[defined])
    undefined = 1 - float(defined.mean())
    tells = gap > LEAST_GAP and undefined <= LOW / RESAMPLES
    return {
        "pgr": (fmean(method) - fmean(without_passages)) / gap if gap > LEAST_GAP else None,
        "pgr_low": float(values[LOW * len(values) // RESAMPLES]) if tells else None,
        "pgr_high": float(values[HIGH * len(values) // RESAMPLES]) if tells else None,
        "pgr_undefined": undefined,
    }
