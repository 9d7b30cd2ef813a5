"""Draw the summary: quality against time, and quality against the share that is recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.evaluation.quality.configurations import FULL
from qcfuse_rag.evaluation.quality.tables import by_dataset

STYLES = ("o-", "s-", "^-", "D-", "v-", "P-", "X-", "<-", ">-", "*-")


def draw(summary: Sequence[Mapping[str, Any]], folder: Path, stem: str) -> list[Path]:
    """Draw two pictures for each dataset and return their files, whose names begin with `stem`.

    RULER's tasks are drawn by string match, other datasets by F1, with 95 % intervals.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise QCFuseError('plots need matplotlib; run `pip install "qcfuse-rag[bench]"`') from error
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for dataset, lines in by_dataset(summary).items():
        quality = "match" if dataset.startswith("ruler_") else "f1"
        for against, label in (("ttft_s", "median time to first token, s"), ("ratio", "share recomputed")):
            path = folder / f"{stem}.{dataset.replace('/', '-')}.{quality}-{against.removesuffix('_s')}.png"
            _draw(lines, dataset, quality, against, label, path)
            drawn.append(path)
    return drawn


def _draw(lines: Sequence[Mapping[str, Any]], dataset: str, quality: str, against: str, label: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for index, ((method, base), points) in enumerate(_curves(lines, against).items()):
        x = [point[against] for point in points]
        y = [point[quality] for point in points]
        bounds = [point["intervals"][quality] for point in points]
        error = [[b["mean"] - b["low"] for b in bounds], [b["high"] - b["mean"] for b in bounds]]
        colour = "black" if method == FULL else f"C{index % 10}"
        name = f"{method} ({base})" if base else method
        style = STYLES[index % len(STYLES)]
        axes.errorbar(x, y, yerr=error, fmt=style, color=colour, capsize=3, markersize=6, lw=1.5, label=name)
        if method == FULL:
            axes.axhline(y[0], color="black", lw=0.8, ls=":")
    axes.set_xlabel(label)
    axes.set_ylabel("string match" if quality == "match" else "token F1")
    full = next((line for line in lines if line["method"] == FULL), lines[0])
    axes.set_title(f"{dataset}, {full['n']} questions; bars are 95 % intervals")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=150)


def _curves(lines: Sequence[Mapping[str, Any]], against: str) -> dict[tuple[str, str | None], list[Mapping[str, Any]]]:
    """Return the points of each method and base, by rising ratio."""
    curves: dict[tuple[str, str | None], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line[against] is not None:
            curves.setdefault((line["method"], line["base"]), []).append(line)
    for points in curves.values():
        points.sort(key=lambda point: (point["ratio"] is None, point["ratio"] or 0.0))
    return curves
