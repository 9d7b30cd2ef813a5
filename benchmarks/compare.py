"""Pooled results of `python -m benchmarks quality`: one method against the others, question by question."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

from typer import Argument, Option

from benchmarks.configurations import FULL
from benchmarks.quality import Group, difference, grouped
from benchmarks.runner import Key, Report, Run, Table, publish
from benchmarks.scoring import format_interval
from qcfuse_rag.errors import QCFuseError

COMPARED = {"identical": "identical", "answer_kl": "KL", "f1": "F1", "nll": "NLL", "off": "off"}


def compare(
    results: Annotated[list[Path], Argument(help="Results of `quality`, of the same model and machine.")],
    method: Annotated[str, Option(help="The method to compare with the others.")] = "auto",
    json: Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Pool results of `quality` over datasets and compare one method with the others.

    Differences are paired by question; their intervals are 95 % bootstrap intervals over all questions of all files.
    The NLL of a gold answer may be lower than full prefill's without being nearer to it: `off` is its mean distance.
    """
    publish(read_results(results), lambda run: pooled(run, method), None, as_json=json)


def read_results(paths: list[Path]) -> Run:
    """Return the records of several results.

    Raises:
        QCFuseError: if a file is no result of `quality`, or of other conditions than the files before it.
    """
    run = Run("quality")
    fixed: dict[str, Any] = {}
    for path in paths:
        result = json_text.loads(path.read_text("utf-8"))
        if not isinstance(result, dict) or not {"records", "conditions", "summary"} <= result.keys():
            raise QCFuseError(f"{path} is no result of `python -m benchmarks quality`")
        conditions = dict(result["conditions"])
        facts = conditions | conditions.pop("datasets", {})
        differing = [name for name, value in facts.items() if fixed.setdefault(name, value) != value]
        if differing:
            raise QCFuseError(f"{path} differs from the files before it in {', '.join(differing)}; give equal runs")
        run.records |= {tuple(record.pop("key")): record for record in result["records"]}
    return run


def pooled(run: Run, method: str) -> Report:
    """Return means of each configuration over all datasets, and the method's differences to others at its ratios."""
    groups: dict[Key, Group] = {}
    for (dataset, *side), group in grouped(run).items():
        groups.setdefault(tuple(side), {}).update({f"{dataset} {name}": record for name, record in group.items()})
    if not any(name == method for name, _, _ in groups):
        raise QCFuseError(f"no file has the method {method!r}")
    full = groups[FULL, None, 1.0]
    for group in groups.values():
        for question, record in group.items():
            record["off"] = abs(record["nll"] - full[question]["nll"])
    order = sorted(groups, key=lambda key: (key[2] or 0, key[0] != method))
    configurations = [
        dict(zip(("method", "base", "ratio"), key, strict=True)) | _figures(groups[key], full) for key in order
    ]
    differences = []
    for key in order:
        same = next((group for other, group in groups.items() if other[0] == method and other[2] == key[2]), None)
        if same is not None and key[0] != method:
            compared = {name: difference(same, groups[key], name) for name in COMPARED}
            differences.append({"method": key[0], "ratio": key[2], **compared})
    summary = {"questions": len(full), "configurations": configurations, "differences": differences}
    columns = ["method", "base", "ratio", "rows of full", "identical", "KL", "F1", "F1 - full", "NLL - full", "off"]
    title = f"{len(full)} questions, of full prefill F1 {fmean(record['f1'] for record in full.values()):.3f}"
    rows = [[*_name(row), *_cells(row)] for row in configurations]
    tables = [Table(title, [*columns, "time of full"], rows)]
    cells = [[*_name(row)[::2], *(format_interval(row[name]) for name in COMPARED)] for row in differences]
    tables.append(Table(f"{method}, less each other method", ["method", "ratio", *COMPARED.values()], cells))
    return Report(summary, tables)


def _figures(group: Group, full: Group) -> dict[str, Any]:
    records = list(group.values())
    return {
        "rows": fmean(record["rows"] / full[question]["rows"] for question, record in group.items()),
        **{name: fmean(record[name] for record in records) for name in ("identical", "answer_kl", "f1", "off")},
        "f1_minus_full": difference(group, full, "f1"),
        "nll_minus_full": difference(group, full, "nll"),
        "ttft_to_full": median(record["ttft_s"] / record["full_ttft_s"] for record in records),
    }


def _name(row: dict[str, Any]) -> list[str]:
    return [row["method"], row.get("base") or "-", "-" if row["ratio"] is None else f"{row['ratio']:g}"]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['rows']:.2f}",
        f"{row['identical']:.0%}",
        *(f"{row[name]:.3f}" for name in ("answer_kl", "f1")),
        *(format_interval(row[name]) for name in ("f1_minus_full", "nll_minus_full")),
        f"{row['off']:.3f}",
        f"{row['ttft_to_full']:.2f}",
    ]
