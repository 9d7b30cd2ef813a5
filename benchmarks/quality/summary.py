"""Summarize records in one line for each dataset and configuration: means, times, paired differences, offline cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.arena_score import gap_recovered
from benchmarks.quality.configurations import FULL, NO_PASSAGES, RANDOM, method_name, plain_base
from benchmarks.quality.offline import OfflineCost
from benchmarks.quality.records import Record

SCORES = ("f1", "em", "rouge_l", "match", "nll")
NEARNESS = ("identical", "answer_kl", "top1", "kl", "length_ratio")
"""Fields of a record that compare an answer with full prefill's, not with the gold answer."""
COSTS = ("rows", "row_layers", "context_tokens", "load_s", "probe_s", "select_s", "recompute_s", "bytes_loaded")
RESAMPLES = 10_000
MEANS = (*SCORES, *NEARNESS, *COSTS)

Group = dict[str, Record]  # records of a dataset and configuration by question id
GroupKey = tuple[str, str, str | None, float | None]  # `(dataset, method, base, ratio)`


def summarize(
    records: Iterable[Record],
    offline: Iterable[OfflineCost] = (),
    preparations: Mapping[tuple[str, str | None, float | None], str | None] | None = None,
    *,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return the summary, in the order of the preparations, then of first appearance; full prefill is first.

    Differences are paired: taken question by question, then averaged and resampled. The control of a method is `random`
    over the same base at the same ratio, with any other parameters and any ranking of tokens. Of several controls, the
    control without parameters is taken, else the first. `preparations` names the preparation of each `(method, base,
    ratio)`.
    """
    groups: dict[GroupKey, Group] = {}
    for record in records:
        key = (record["dataset"], record["method"], record["base"], record["ratio"])
        groups.setdefault(key, {})[record["id"]] = record
    costs = list(offline)
    lines = []
    datasets = list(dict.fromkeys(key[0] for key in groups))
    order = {key: position for position, key in enumerate(preparations or ())}
    for dataset, method, base, ratio in sorted(
        groups, key=lambda key: (datasets.index(key[0]), key[1] != FULL, order.get(key[1:], len(order)))
    ):
        group = groups[dataset, method, base, ratio]
        full, without_passages = groups.get((dataset, FULL, None, 1.0), {}), groups.get((dataset, *NO_PASSAGES.key), {})
        controlled = method_name(method) not in (RANDOM, FULL, NO_PASSAGES.label)
        control = _control(groups, dataset, base, ratio) if controlled else None
        preparation = (preparations or {}).get((method, base, ratio))
        to_random = {name: _difference(group, control, name, seed) for name in ("f1", "answer_kl")} if control else None
        line = {
            **{"dataset": dataset, "method": method, "base": base, "ratio": ratio},
            **_figures(list(group.values()), seed),
            "minus_full": {name: _difference(group, full, name, seed) for name in SCORES},
            "minus_random": to_random,
            "recovered": _recovered(group, full, without_passages, quality_score(dataset)),
            **_offline([cost for cost in costs if cost.preparation == preparation]),
        }
        lines.append(line)
    return lines


def _control(groups: Mapping[GroupKey, Group], dataset: str, base: str | None, ratio: float | None) -> Group | None:
    wanted = (dataset, RANDOM, plain_base(base), ratio)
    controls = [key for key in groups if (key[0], method_name(key[1]), key[2], key[3]) == wanted]
    return groups[wanted if wanted in groups else controls[0]] if controls else None


def _figures(records: Sequence[Record], seed: int) -> dict[str, Any]:
    columns = {name: [record[name] for record in records if name in record] for name in MEANS}
    selecting = [(record["probe_s"] + record["select_s"]) / record["ttft_s"] for record in records]
    return {
        "n": len(records),
        **{name: statistics.fmean(values) if values else None for name, values in columns.items()},
        "intervals": {name: mean_interval([r[name] for r in records], seed) for name in (*SCORES, *NEARNESS)},
        "ttft_s": statistics.median(record["ttft_s"] for record in records),
        "ttft_to_full": statistics.median(record["ttft_s"] / record["full_ttft_s"] for record in records),
        "selection_share": statistics.median(selecting),
        "zero_share": statistics.fmean(record["f1"] == 0 for record in records),
        "fallbacks": sum(record.get("fallback") is not None for record in records),
    }


def _difference(group: Group, other: Group | None, name: str, seed: int) -> dict[str, float] | None:
    shared = [identity for identity in group if other and identity in other]
    if not other or not shared:
        return None
    return mean_interval([group[i][name] - other[i][name] for i in shared], seed)


def _recovered(group: Group, full: Group, without_passages: Group, name: str) -> dict[str, float | None] | None:
    """Return the share of full prefill's gain from the passages that a method keeps, see `gap_recovered`.

    It is taken over the questions that all three answered. It is None where full prefill gains nothing; `low` and
    `high` are None where that is uncertain.
    """
    shared = [identity for identity in group if identity in full and identity in without_passages]
    if not shared:
        return None
    pgr = gap_recovered(*([side[identity][name] for identity in shared] for side in (group, without_passages, full)))
    return None if pgr["pgr"] is None else {"mean": pgr["pgr"], "low": pgr["pgr_low"], "high": pgr["pgr_high"]}


def quality_score(dataset: str) -> str:
    """Return the score that says whether a dataset's answers are right: string match for RULER's tasks, else F1."""
    return "match" if dataset.startswith("ruler_") else "f1"


def _offline(costs: Sequence[OfflineCost]) -> dict[str, Any]:
    """Return the offline cost, in all and for each prepared passage; None for each if no passage had to be prepared."""
    chunks = sum(cost.chunks for cost in costs)
    seconds, stored = sum(cost.seconds for cost in costs), sum(cost.size_bytes for cost in costs)
    return {
        "offline_chunks": chunks,
        "offline_s": seconds,
        "offline_bytes": stored,
        "offline_s_per_chunk": seconds / chunks if chunks else None,
        "offline_bytes_per_chunk": stored / chunks if chunks else None,
    }


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
