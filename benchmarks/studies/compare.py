"""Pooled results of `python -m benchmarks quality`: one method against the others, question by question."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.quality.configurations import FULL, NO_PASSAGES, Key
from benchmarks.quality.summary import format_interval, mean_interval
from benchmarks.quality.tables import markdown_table, new_figure
from benchmarks.studies.runner import StudyResult
from qcfuse_rag.errors import QCFuseError

COLUMNS = (
    "method", "base", "ratio", "rows of full", "identical", "KL", "KL, median", "F1", "F1 - full", "NLL - full", "off",
    "time of full",
)  # fmt: skip
CONDITIONS = ("model", "device", "seed", "distractors", "top_k", "max_new_tokens")
COMPARED, TITLES = ("identical", "answer_kl", "f1", "nll", "off"), ("identical", "KL", "F1", "NLL", "off")

Group = dict[tuple[str, str], dict[str, Any]]  # the records of a configuration by dataset and question


def compare(results: list[Path], method: str = "auto", plot: Path | None = None) -> StudyResult:
    """Pool result files of `python -m benchmarks quality` over datasets and compare one method with the others.

    `KL` is the mean along full prefill's greedy answer. Differences are paired by question; their intervals are 95 %
    bootstrap intervals over all questions of all files. The NLL of a gold answer may be lower than full prefill's
    without being nearer to it: `off` is its mean distance from full prefill's. The tables are Markdown. `--plot` draws
    KL against time to first token.
    """
    groups = _read(results)
    if not any(name == method for name, _, _ in groups):
        raise QCFuseError(f"no file has the method {method!r}")
    full = groups[FULL, None, 1.0]
    for group in groups.values():
        for question, record in group.items():
            record["off"] = abs(record["nll"] - full[question]["nll"])
    heading = (
        f"{len(full)} questions, of full prefill F1 {fmean(record['f1'] for record in full.values()):.3f}, "
        f"F1 of 0 for {fmean(record['f1'] == 0 for record in full.values()):.0%} of them\n"
    )
    by_ratio = sorted(groups, key=lambda key: (key[2] or 0, key[0] != method))
    figures = {key: _figures(groups[key], full) for key in by_ratio}
    rows = [_cells(key, figures[key]) for key in by_ratio]
    differences: list[dict[str, Any]] = []
    for key in by_ratio:
        same_ratio = next((group for other, group in groups.items() if other[0] == method and other[2] == key[2]), None)
        if same_ratio is not None and key[0] != method:
            difference = {name: _difference(same_ratio, groups[key], name) for name in COMPARED}
            differences.append({"method": key[0], "ratio": key[2], **difference})
    lines = [
        [
            f"`{row['method']}`",
            "-" if row["ratio"] is None else f"{row['ratio']:g}",
            *(format_interval(row[name]) for name in COMPARED),
        ]
        for row in differences
    ]
    if plot is not None:
        _plot(groups, method, plot)
    data = {
        "questions": len(full),
        "configurations": [{"method": m, "base": b, "ratio": r, **figures[m, b, r]} for m, b, r in by_ratio],
        "differences": differences,
    }
    tables = [markdown_table(COLUMNS, rows), markdown_table((f"`{method}` less", "ratio", *TITLES), lines)]
    return StudyResult(data, [heading, tables[0], "", tables[1]])


def _read(paths: list[Path]) -> dict[Key, Group]:
    groups: dict[Key, Group] = {}
    fixed: dict[str, Any] = {}
    for path in paths:
        result = json.loads(path.read_text("utf-8"))
        if not isinstance(result, dict) or not {"records", "about"} <= result.keys():
            raise QCFuseError(f"{path} is no result of `python -m benchmarks quality`")
        conditions = result["about"]["conditions"]
        facts = {name: conditions.get(name) for name in CONDITIONS} | conditions["datasets"]
        differing = [name for name, value in facts.items() if fixed.setdefault(name, value) != value]
        if differing:
            raise QCFuseError(f"{path} differs from the files before it in {', '.join(differing)}; give equal runs")
        for record in result["records"]:
            if "answer_kl" not in record:
                raise QCFuseError(f"{path} compares first tokens only, not answers; measure again")
            key = (record["method"], record["base"], record["ratio"])
            groups.setdefault(key, {})[record["dataset"], record["id"]] = record
    return groups


def _figures(group: Group, full: Group) -> dict[str, Any]:
    """Return means, the median of paired times, and paired differences to full prefill."""
    records = list(group.values())
    return {
        "rows": fmean(record["rows"] / full[question]["rows"] for question, record in group.items()),
        "identical": fmean(record["identical"] for record in records),
        "f1": fmean(record["f1"] for record in records),
        "f1_minus_full": _difference(group, full, "f1"),
        "nll_minus_full": _difference(group, full, "nll"),
        "off": fmean(record["off"] for record in records),
        "answer_kl": fmean(record["answer_kl"] for record in records),
        "answer_kl_median": median(record["answer_kl"] for record in records),
        "ttft_to_full": median(record["ttft_s"] / record["full_ttft_s"] for record in records),
    }


def _cells(key: Key, figures: Mapping[str, Any]) -> list[str]:
    method, base, ratio = key
    first = [f"`{method}`", base or "-", "-" if ratio is None else f"{ratio:g}", f"{figures['rows']:.2f}"]
    if method == FULL:
        return [*first, *"---", f"{figures['f1']:.3f}", *"---", "1.00"]
    nearness = [f"{figures['identical']:.0%}", *(f"{figures[name]:.3f}" for name in ("answer_kl", "answer_kl_median"))]
    intervals = [format_interval(figures[name]) for name in ("f1_minus_full", "nll_minus_full")]
    scores = [f"{figures['f1']:.3f}", *intervals, f"{figures['off']:.3f}"]
    return [*first, *nearness, *scores, f"{figures['ttft_to_full']:.2f}"]


def _difference(group: Group, other: Group, name: str) -> dict[str, float]:
    """Return a paired mean difference with its interval, over the questions that both have."""
    return mean_interval(
        [record[name] - other[question][name] for question, record in group.items() if question in other]
    )


def _plot(groups: Mapping[Key, Group], method: str, path: Path) -> None:
    figure, axes = new_figure(8, 5)
    curves: dict[tuple[str, str | None], list[tuple[float, float, float]]] = {}
    for (name, base, ratio), group in groups.items():
        if name == NO_PASSAGES.label:
            continue
        times = median(record["ttft_s"] / record["full_ttft_s"] for record in group.values())
        point = (ratio or 0.0, times, fmean(record["answer_kl"] for record in group.values()))
        curves.setdefault((name, base), []).append(point)
    for (name, base), points in curves.items():
        ratios, times, divergences = zip(*sorted(points), strict=True)
        label = name if base is None or "[" in name else f"{name} ({base})"
        axes.plot(times, divergences, marker="o", label=label, linewidth=3 if name == method else 1.2)
        for ratio, x, y in zip(ratios, times, divergences, strict=True):
            axes.annotate(f"{ratio:g}", (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set(
        xlabel="time to first token, as a share of full prefill's (median)",
        ylabel="KL from full prefill along its answer, nats a token (mean)",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
