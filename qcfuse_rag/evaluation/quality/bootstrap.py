"""Bootstrap intervals of a mean over questions; paired, when given differences of the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000


def mean_interval(values: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Return `mean` and the 2.5 % and 97.5 % quantiles, `low` and `high`, of the means of 10,000 resamples.

    Args:
        values: one for each question, at least one.
        seed: of the resamples; the same for all values of as many questions.
    """
    sample = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(_weights(len(sample), seed) @ sample, [0.025, 0.975])
    return {"mean": float(sample.mean()), "low": float(low), "high": float(high)}


@lru_cache(maxsize=8)
def _weights(count: int, seed: int) -> NDArray[np.float64]:
    """Return `[10000, count]`: how often each question is drawn in each resample, over the number of questions."""
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return drawn / count
