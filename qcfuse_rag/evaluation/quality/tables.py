"""The summary as tables for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from qcfuse_rag.evaluation.quality.bootstrap import format_interval

COLUMNS = (
    "method", "base", "ratio", "n", "F1", "F1 - full", "EM", "ROUGE-L", "match", "NLL", "NLL - full", "KL",
    "F1 - random", "KL - random", "TTFT", "of full", "selecting", "offline / chunk",
)  # fmt: skip
NARROW = ("method", "base", "ratio", "F1", "match", "NLL", "KL", "TTFT", "of full")
WIDE = ("method", "base", "ratio", "F1", "F1 - full", "match", "NLL", "KL", "KL - random", "TTFT", "of full")
WORDS = ("method", "base", "tier")
"""Columns of text, not of figures."""
WIDE_COLUMNS = 140
"""Least width of a terminal that fits intervals."""

LEGEND = (
    "Means over questions; in brackets paired 95 % bootstrap intervals. NLL: nats a token of the gold answer; KL: nats "
    "at the first token, from full prefill; TTFT: median, and median of the paired ratios to full prefill; selecting: "
    "probe and selection as a share of TTFT; random: the control over the same base at the same ratio."
)


def terminal_tables(summary: Sequence[Mapping[str, Any]], width: int) -> list[Table]:
    """Return a table for each dataset with the columns that fit a terminal of this width."""
    names = WIDE if width >= WIDE_COLUMNS else NARROW
    tables = []
    for dataset, lines in by_dataset(summary).items():
        rows = [[cells[name] for name in names] for cells in map(row, lines)]
        tables.append(figures(_title(dataset, lines), names, rows))
    return tables


def figures(title: str, names: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a table for the terminal; method names with parameters may wrap, figures never do."""
    table = Table(title=title)
    for name in names:
        side: Literal["left", "right"] = "left" if name in WORDS else "right"
        fold = name == "method"
        table.add_column(name, justify=side, no_wrap=not fold, overflow="fold" if fold else "ellipsis")
    for cells in rows:
        table.add_row(*map(escape, cells))  # parameters stand in brackets, as markup does
    return table


def markdown(summary: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """Return the summary as a page of Markdown with all columns."""
    parts = [f"# Quality: {about['model']}", f"`{about['command']}`", LEGEND]
    parts += [f"{note}" for note in about.get("notes", ())]
    for dataset, lines in by_dataset(summary).items():
        rows = [[row(line)[name] for name in COLUMNS] for line in lines]
        parts.append(f"## {_title(dataset, lines)}\n\n{markdown_table(COLUMNS, rows)}")
    return "\n\n".join(parts) + "\n"


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])


def by_dataset(summary: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the lines of each dataset."""
    datasets: dict[str, list[Mapping[str, Any]]] = {}
    for line in summary:
        datasets.setdefault(line["dataset"], []).append(line)
    return datasets


def row(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a line by column."""
    against, control = line["minus_full"], line["minus_random"] or {}
    full = line["method"] == "full"
    chunk_s, chunk_bytes = line["offline_s_per_chunk"], line["offline_bytes_per_chunk"]
    return {
        "method": line["method"],
        "base": line["base"] or "-",
        "ratio": "-" if line["ratio"] is None else f"{line['ratio']:g}",
        "n": str(line["n"]),
        "F1": f"{line['f1']:.3f}",
        "F1 - full": "-" if full else _with_interval(against["f1"]),
        "EM": f"{line['em']:.3f}",
        "ROUGE-L": f"{line['rouge_l']:.3f}",
        "match": f"{line['match']:.3f}",
        "NLL": f"{line['nll']:.3f}",
        "NLL - full": "-" if full else _with_interval(against["nll"]),
        "KL": "-" if full else f"{line['kl']:.3f}",
        "F1 - random": _with_interval(control.get("f1")),
        "KL - random": _with_interval(control.get("kl")),
        "TTFT": f"{line['ttft_s']:.3g} s",
        "of full": f"{line['ttft_to_full']:.2f}",
        "selecting": f"{line['selection_share']:.0%}",
        "offline / chunk": "-" if chunk_s is None else f"{1000 * chunk_s:.3g} ms, {chunk_bytes / 1e6:.3g} MB",
    }


def _with_interval(interval: Mapping[str, float] | None) -> str:
    return "-" if interval is None else format_interval(interval)


def _title(dataset: str, lines: Sequence[Mapping[str, Any]]) -> str:
    full = next((line for line in lines if line["method"] == "full"), lines[0])
    return f"{dataset}: {full['n']} questions, full prefill scores F1 0 on {full['zero_share']:.0%} of them"
