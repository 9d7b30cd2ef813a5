"""Bootstrap intervals of a mean over questions; differences of the same questions make them paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000


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
