"""The ladder of `auto`: what each ratio leaves of full prefill's answers, plain and with residuals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from rich.table import Table

from benchmarks.quality.metrics import token_f1
from benchmarks.quality.tables import new_figure
from benchmarks.samples import Sample
from benchmarks.studies.runner import (
    FULL_PREFILL,
    DataFiles,
    StudyResult,
    StudyRun,
    difference_cell,
    load_engine,
)
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.methods import make_method
from qcfuse_rag.verification.divergence import answer_text, compare_greedy_answers, greedy_answer

Figures = dict[str, dict[str, list[float]]]
"""By method and name of the figure, the values of all questions, in their order."""


@dataclass(frozen=True, slots=True)
class LadderOptions:
    """The ratios, whether residuals are tried too, and the answer's token limit."""

    ratios: tuple[float, ...]
    residuals: bool
    answer_tokens: int


def ladder(
    run: StudyRun,
    files: DataFiles,
    ratios: str = "0.05,0.15,0.3",
    residuals: bool = False,
    answer_tokens: int = 24,
    plot: Path | None = None,
) -> StudyResult:
    """Compare `auto` at several ratios with full prefill: on whole answers, and in time.

    `residuals` tries each ratio with residuals too.
    Divergences run along full prefill's greedy answer, in nats a token. Differences are paired, with 95 % bootstrap
    intervals.
    """
    options = LadderOptions(tuple(float(ratio) for ratio in ratios.split(",")), residuals, answer_tokens)
    figures: Figures = {}
    with load_engine(files.model) as engine:
        name = engine.lm.name
        for path in files.data:
            samples = replace(files, data=[path]).examples()
            methods = _methods(options)
            for sample in run.track(samples):
                _measure(engine, sample, methods, options, figures)
                engine.store.clear()
                run.keep(figures)
    if plot is not None:
        _draw(figures, plot, name)
    return StudyResult({"model": name, "figures": figures}, [_table(figures)])


def _methods(options: LadderOptions) -> dict[str, Method]:
    return {
        f"{ratio:g}{' residuals' if residuals else ''}": make_method(
            "auto", ratio=ratio, residuals=residuals, guard=False
        )
        for ratio in options.ratios
        for residuals in ((False, True) if options.residuals else (False,))
    }


def _measure(
    engine: FusionEngine, sample: Sample, methods: dict[str, Method], options: LadderOptions, figures: Figures
) -> None:
    bases = next(iter(methods.values())).bases
    engine.warm(sample.passages[:1], bases=bases)
    engine.warm(sample.passages[1:], bases=bases[:1])
    prompt = engine.prompt(sample.question, sample.passages)
    full = engine.prefill(prompt, method=FULL_PREFILL, answer_tokens=options.answer_tokens)
    full_answer = greedy_answer(engine.runner, full, options.answer_tokens)
    full_s, full_f1 = full.report.timings.ttft_s, _f1(engine, full_answer[0], sample)
    del full
    for name, method in methods.items():
        fused = engine.prefill(prompt, method=method, answer_tokens=options.answer_tokens)
        [answer] = compare_greedy_answers(engine.runner, [full_answer], [fused], options.answer_tokens)
        values = {
            **answer.divergence.summary(),
            "f1": _f1(engine, answer.ids or (), sample),
            "full_f1": full_f1,
            "time_of_full": fused.report.timings.ttft_s / full_s,
        }
        for figure, value in values.items():
            figures.setdefault(name, {}).setdefault(figure, []).append(value)


def _f1(engine: FusionEngine, ids: Sequence[int], sample: Sample) -> float:
    return token_f1(answer_text(engine.lm, ids), sample.answers) if sample.answers else 0.0


def _table(figures: Figures) -> Table:
    table = Table("ratio", "n", "KL", "less plain", "first KL", "top-1", "identical", "F1 - full", "time of full")
    for name, values in figures.items():
        plain = figures[name.split()[0]]
        table.add_row(
            name,
            str(len(values["answer_kl"])),
            f"{fmean(values['answer_kl']):.4f}",
            difference_cell(values["answer_kl"], plain["answer_kl"]) if values is not plain else "-",
            f"{fmean(values['first_kl']):.4f}",
            f"{fmean(values['top1']):.3f}",
            f"{fmean(values['identical']):.3f}",
            difference_cell(values["f1"], values["full_f1"]),
            f"{median(values['time_of_full']):.2f}",
        )
    return table


def _draw(figures: Figures, path: Path, model: str) -> None:
    """Draw identical answers against time to first token."""
    figure, axes = new_figure(7, 4.5)
    series: dict[str, list[tuple[float, float, str]]] = {}
    for name, values in figures.items():
        ratio, _, kind = name.partition(" ")
        point = (median(values["time_of_full"]), 100 * fmean(values["identical"]), ratio)
        series.setdefault(f"auto {kind}", []).append(point)
    for (label, points), style in zip(series.items(), ("o-", "s--", "^-", "v--"), strict=False):
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], style, label=label)
        for x, y, ratio in points:
            axes.annotate(ratio, (x, y), textcoords="offset points", xytext=(5, -10))
    axes.plot([1.0], [100.0], "k*", markersize=12, label="full prefill")
    axes.set_xlabel("median time to first token, as a share of full prefill's")
    axes.set_ylabel("answers identical to full prefill's, %")
    count = len(next(iter(figures.values()))["answer_kl"])
    axes.set_title(f"{model}\n{count} questions; the numbers are ratios")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
