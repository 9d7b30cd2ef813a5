"""The summary as tables for the terminal, as Markdown, and as pictures of quality against time and share recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from benchmarks.quality.configurations import FULL, NO_PASSAGES
from benchmarks.quality.summary import format_interval, quality_score
from qcfuse_rag.errors import QCFuseError

NARROW = ("method", "base", "ratio", "identical", "KL", "F1", "recovered", "of full")
WIDE = ("method", "base", "ratio", "identical", "KL", "F1", "F1 - full", "recovered", "TTFT", "of full")
MATCHED = {"F1": "match", "F1 - full": "match - full"}
"""Columns of RULER's tasks, whose answers are searched for the hidden strings, in place of those of F1."""
WORDS = ("method", "base", "tier")  # columns of text, not of figures
STYLES = ("o-", "s-", "^-", "D-", "v-", "P-", "X-", "<-", ">-", "*-")
WIDE_COLUMNS = 140  # least width of a terminal that fits intervals
LEGEND = (
    "Means over questions; in brackets paired 95 % bootstrap intervals. identical: share of greedy answers that are "
    "full prefill's; KL: nats a token from full prefill along its greedy answer; KL first: the same at the first "
    "token; top-1: share of that answer's tokens that are predicted; length: tokens of the answer over full "
    "prefill's; recovered: share of full prefill's gain in F1 (in RULER's tasks: match) over `no passages`, which is "
    "full prefill of the question alone; NLL: nats a token of the gold answer; TTFT: median, and median of the paired "
    "ratios to full prefill; selecting: probe and selection as a share of TTFT; random: the control over the same "
    "base at the same ratio."
)


def terminal_tables(summary: Sequence[Mapping[str, Any]], width: int) -> list[Table]:
    """Return a table for each dataset with the columns that fit a terminal of this width."""
    tables = []
    for dataset, lines in by_dataset(summary).items():
        names: Sequence[str] = WIDE if width >= WIDE_COLUMNS else NARROW
        if quality_score(dataset) == "match":
            names = [MATCHED.get(name, name) for name in names]
        rows = [[cells[name] for name in names] for cells in map(row, lines)]
        if width < WIDE_COLUMNS:
            rows = [[cell.partition(" [")[0] for cell in cells] for cells in rows]
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
        rows = [row(line) for line in lines]
        table = markdown_table(list(rows[0]), [list(cells.values()) for cells in rows])
        parts.append(f"## {_title(dataset, lines)}\n\n{table}")
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
    against, control, recovered = line["minus_full"], line["minus_random"] or {}, line["recovered"]
    full = line["method"] == FULL
    if line["method"] in (FULL, NO_PASSAGES.label):
        recovered = None
    chunk_s, chunk_bytes = line["offline_s_per_chunk"], line["offline_bytes_per_chunk"]
    return {
        "method": line["method"],
        "base": line["base"] or "-",
        "ratio": "-" if line["ratio"] is None else f"{line['ratio']:g}",
        "n": str(line["n"]),
        "identical": "-" if full else f"{line['identical']:.0%}",
        "KL": "-" if full else f"{line['answer_kl']:.3f}",
        "F1": f"{line['f1']:.3f}",
        "F1 - full": "-" if full else _with_interval(against["f1"]),
        "recovered": _share_with_interval(recovered),
        "top-1": "-" if full else f"{line['top1']:.0%}",
        "length": f"{line['length_ratio']:.2f}",
        "EM": f"{line['em']:.3f}",
        "ROUGE-L": f"{line['rouge_l']:.3f}",
        "match": f"{line['match']:.3f}",
        "match - full": "-" if full else _with_interval(against["match"]),
        "NLL": f"{line['nll']:.3f}",
        "NLL - full": "-" if full else _with_interval(against["nll"]),
        "KL first": "-" if full else f"{line['kl']:.3f}",
        "F1 - random": _with_interval(control.get("f1")),
        "KL - random": _with_interval(control.get("answer_kl")),
        "TTFT": f"{line['ttft_s']:.3g} s",
        "of full": f"{line['ttft_to_full']:.2f}",
        "selecting": f"{line['selection_share']:.0%}",
        "offline / chunk": "-" if chunk_s is None else f"{1000 * chunk_s:.3g} ms, {chunk_bytes / 1e6:.3g} MB",
    }


def _with_interval(interval: Mapping[str, float] | None) -> str:
    return "-" if interval is None else format_interval(interval)


def _share_with_interval(share: Mapping[str, float | None] | None) -> str:
    if share is None:
        return "-"
    bounds = "" if share["low"] is None else f" [{share['low']:.0%}, {share['high']:.0%}]"
    return f"{share['mean']:.0%}{bounds}"


def _title(dataset: str, lines: Sequence[Mapping[str, Any]]) -> str:
    full = _reference(lines)
    return f"{dataset}: {full['n']} questions, full prefill scores F1 0 on {full['zero_share']:.0%} of them"


def _reference(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next((line for line in lines if line["method"] == FULL), lines[0])


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return an empty figure of `width` by `height` inches and its axes, or say how to install matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise QCFuseError('plots need matplotlib; run `pip install "qcfuse-rag[bench]"`') from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def draw(summary: Sequence[Mapping[str, Any]], folder: Path, stem: str) -> list[Path]:
    """Draw two pictures for each dataset and return their files, whose names begin with `stem`.

    RULER's tasks are drawn by string match, other datasets by F1, with 95 % intervals.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for dataset, lines in by_dataset(summary).items():
        quality = quality_score(dataset)
        for against, label in (("ttft_s", "median time to first token, s"), ("ratio", "share recomputed")):
            path = folder / f"{stem}.{dataset.replace('/', '-')}.{quality}-{against.removesuffix('_s')}.png"
            _draw(lines, dataset, quality, against, label, path)
            drawn.append(path)
    return drawn


def _draw(lines: Sequence[Mapping[str, Any]], dataset: str, quality: str, against: str, label: str, path: Path) -> None:
    figure, axes = new_figure(9, 5.5)
    for index, ((method, base), points) in enumerate(_curves(lines, against).items()):
        x = [point[against] for point in points]
        y = [point[quality] for point in points]
        bounds = [point["intervals"][quality] for point in points]
        # Rounding can put the mean of equal scores outside of its interval.
        error = [[max(0.0, b["mean"] - b["low"]) for b in bounds], [max(0.0, b["high"] - b["mean"]) for b in bounds]]
        colour = "black" if method == FULL else f"C{index % 10}"
        name = f"{method} ({base})" if base else method
        style = STYLES[index % len(STYLES)]
        axes.errorbar(x, y, yerr=error, fmt=style, color=colour, capsize=3, markersize=6, lw=1.5, label=name)
        if method == FULL:
            axes.axhline(y[0], color="black", lw=0.8, ls=":")
    for line in lines:
        if line["method"] == NO_PASSAGES.label:
            axes.axhline(line[quality], color="grey", lw=0.8, ls="--", label=NO_PASSAGES.label)
    axes.set_xlabel(label)
    axes.set_ylabel("string match" if quality == "match" else "token F1")
    axes.set_title(f"{dataset}, {_reference(lines)['n']} questions; bars are 95 % intervals")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=150)


def _curves(lines: Sequence[Mapping[str, Any]], against: str) -> dict[tuple[str, str | None], list[Mapping[str, Any]]]:
    curves: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line[against] is not None and line["method"] != NO_PASSAGES.label:
            curves.setdefault((line["method"], line["base"]), []).append(line)
    for points in curves.values():
        points.sort(key=lambda point: (point["ratio"] is None, point["ratio"] or 0.0))
    return curves
