"""Pool results of `qcfuse bench quality` over datasets and compare one method with the others, question by question.

    python benchmarks/compare.py A.json B.json ... [--method auto] [--plot FILE.png]

Differences are paired and their intervals are 95 % bootstrap intervals over all questions of all files. The NLL of a
gold answer may be lower than full prefill's without being nearer to it: `off` is its mean distance, on either side.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

from qcfuse_rag.evaluation.quality.bootstrap import mean_interval

SHOWN = ("f1", "nll", "off", "kl")
Key = tuple[str, str | None, float | None]


def main() -> None:
    """Read, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--plot", type=Path, default=None)
    given = parser.parse_args()
    groups = read(given.results)
    full = groups["full", None, 1.0]
    for group in groups.values():
        for identity, record in group.items():
            record["off"] = abs(record["nll"] - full[identity]["nll"])
    print(f"{len(full)} questions, of full prefill F1 {fmean(r['f1'] for r in full.values()):.3f}, ", end="")
    print(f"F1 of 0 for {fmean(r['f1'] == 0 for r in full.values()):.0%} of them\n")
    print(
        "| method | base | ratio | rows of full | F1 | F1 - full | NLL - full | off | KL | KL, median | time of full |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for key, group in sorted(groups.items(), key=lambda item: (item[0][2] or 0, item[0][0] != given.method)):
        print(line(key, group, full))
    print(f"\n| `{given.method}` less | ratio | F1 | NLL | off | KL |\n|---|---|---|---|---|---|")
    for key, group in sorted(groups.items(), key=lambda item: item[0][2] or 0):
        own = next((g for k, g in groups.items() if k[0] == given.method and k[2] == key[2]), None)
        if own is not None and key[0] != given.method:
            print(f"| `{key[0]}` | {key[2]:g} | " + " | ".join(difference(own, group, name) for name in SHOWN) + " |")
    if given.plot is not None:
        plot(groups, given.plot)


def read(paths: list[Path]) -> dict[Key, dict[tuple[str, str], dict[str, Any]]]:
    """Return records by configuration and then by dataset and question."""
    groups: dict[Key, dict[tuple[str, str], dict[str, Any]]] = {}
    for path in paths:
        for record in json.loads(path.read_text("utf-8"))["records"]:
            key = (record["method"], record["base"], record["ratio"])
            groups.setdefault(key, {})[record["dataset"], record["id"]] = record
    return groups


def line(key: Key, group: dict[Any, dict[str, Any]], full: dict[Any, dict[str, Any]]) -> str:
    """Return a row of the table: means, paired differences to full prefill, the median of paired times."""
    records = list(group.values())
    share = fmean(r["rows"] / full[i]["rows"] for i, r in group.items())
    kl = [r["kl"] for r in records]
    ttft = median(r["ttft_s"] / r["full_ttft_s"] for r in records)
    own = f"| `{key[0]}` | {key[1] or '-'} | {key[2]:g} | {share:.2f} | {fmean(r['f1'] for r in records):.3f} "
    if key[0] == "full":
        return own + "| - | - | - | - | - | 1.00 |"
    return (
        own
        + f"| {difference(group, full, 'f1')} | {difference(group, full, 'nll')} "
        + f"| {fmean(r['off'] for r in records):.3f} | {fmean(kl):.3f} | {median(kl):.3f} | {ttft:.2f} |"
    )


def difference(group: dict[Any, dict[str, Any]], other: dict[Any, dict[str, Any]], name: str) -> str:
    """Return a paired mean difference with its interval, over the questions both have."""
    found = mean_interval([group[i][name] - other[i][name] for i in group if i in other])
    return f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def plot(groups: dict[Key, dict[tuple[str, str], dict[str, Any]]], path: Path) -> None:
    """Draw KL against the time to first token, a line for each method over its ratios."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    lines: dict[tuple[str, str | None], list[tuple[float, float, float]]] = {}
    for (name, base, ratio), group in groups.items():
        records = list(group.values())
        time_ = median(r["ttft_s"] / r["full_ttft_s"] for r in records)
        lines.setdefault((name, base), []).append((time_, fmean(r["kl"] for r in records), ratio or 0.0))
    for (name, base), points in lines.items():
        times, divergences, ratios = zip(*sorted(points, key=lambda point: point[2]), strict=True)
        label = name if base is None or "[" in name else f"{name} ({base})"
        axes.plot(times, divergences, marker="o", label=label, linewidth=3 if name == "auto" else 1.2)
        for x, y, ratio in zip(times, divergences, ratios, strict=True):
            axes.annotate(f"{ratio:g}", (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set_xlabel("time to first token, as a share of full prefill's (median)")
    axes.set_ylabel("KL of the first token from full prefill, nats (mean)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
