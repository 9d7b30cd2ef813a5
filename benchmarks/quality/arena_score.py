"""Score answers as KVShareArena does: performance gap recovered (PGR), with paired bootstrap intervals.

Source: github.com/xishi404/KVShareArena, `docs/benchmark.md`. The resamples are the arena's, so that intervals of the
same scores are the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

SEED, RESAMPLES = 20260730, 10_000
LOW, HIGH = 249, 9749
"""Ranks, from 0, of the ends of a 95 % interval among the sorted values of all resamples."""

LEAST_GAP = 1e-3
"""PGR is undefined if full prefill's mean score exceeds the mean score without passages by at most this."""


def gap_recovered(
    method: Sequence[float], without_passages: Sequence[float], full: Sequence[float]
) -> dict[str, float | None]:
    """Return the PGR of mean scores and its 95 % interval over questions.

    Args:
        method: the method's score for each question.
        without_passages: the scores without passages, in the same order.
        full: the scores of full prefill, in the same order.

    Returns:
        `pgr`, None where undefined; `pgr_low` and `pgr_high`, both None if PGR is undefined in more than 2.5 % of the
        resamples, which says that these questions cannot tell; and `pgr_undefined`, the share of those resamples.
    """
    gap = fmean(full) - fmean(without_passages)
    means = [_resampled_means(scores) for scores in (method, without_passages, full)]
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


def paired_difference(scores: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the mean difference of scores of the same questions, `mean`, and its 95 % interval, `low` and `high`."""
    differences = [score - other for score, other in zip(scores, others, strict=True)]
    means = np.sort(_resampled_means(differences))
    return {"mean": fmean(differences), "low": float(means[LOW]), "high": float(means[HIGH])}


def _resampled_means(values: Sequence[float]) -> NDArray[np.float64]:
    """Return `[10000]`: the mean of each resample."""
    means: NDArray[np.float64] = np.asarray(values, np.float64)[_resamples(len(values))].mean(1)
    return means


@lru_cache(maxsize=4)
def _resamples(count: int) -> NDArray[np.int32]:
    """Return `[10000, count]`: the questions of each resample."""
    generator = random.Random(SEED)
    drawn = (generator.randrange(count) for _ in range(RESAMPLES * count))
    return np.fromiter(drawn, np.int32).reshape(RESAMPLES, count)
