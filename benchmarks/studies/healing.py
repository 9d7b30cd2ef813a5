"""Healing while an answer is decoded: how near its tokens come to full prefill's, and what a token then costs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Table
from torch import Tensor

from benchmarks.studies.runner import FULL_PREFILL, StudyResult, StudyRun, difference_cell, load_engine
from qcfuse_rag.bundled import corpus
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.fusion.healing import Healing
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.generation.decoder import ATTENDED
from qcfuse_rag.generation.teacher_forcing import greedy_answer
from qcfuse_rag.methods import make_method
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.verification.checks import fit_cases
from qcfuse_rag.verification.divergence import divergence

LATE = 8
"""The first answer token that is counted: healing has hardly begun before it."""


def healing(
    run: StudyRun,
    model: str | None = None,
    size: int = 30,
    ratio: float = 0.05,
    answer_tokens: int = 64,
    rows: str = "8,16,64",
) -> StudyResult:
    """Compare an answer over a cache that heals while it is decoded with full prefill's and with an unhealed cache.

    Each prompt has one question and four documents. Answers shorter than `--answer-tokens` are skipped. Each number of
    `--rows` healed in a step is tried in ascending order, and with the tokens that the answer attends to most first, as
    `heal` does. All steps follow full prefill's greedy answer. KL is that of its tokens from the eighth on, in
    nats a token; differences to the unhealed cache (0 rows) are paired, with 95 % bootstrap intervals.
    """
    counts = sorted({int(count) for count in rows.split(",")} - {0})
    variants = [(0, 0.0), *((count, attended) for count in counts for attended in (0.0, ATTENDED))]
    records: dict[tuple[int, float], list[HealedAnswer]] = {variant: [] for variant in variants}
    skipped = 0
    method = make_method("auto", ratio=ratio, guard=False)
    with load_engine(model) as engine:
        name = engine.lm.name
        for case in run.track(fit_cases(list(corpus().values()), size)):
            engine.warm(case.passages)
            prompt = engine.prompt(case.question, case.passages)
            full = engine.prefill(prompt, method=FULL_PREFILL, answer_tokens=answer_tokens)
            ids, logits = greedy_answer(engine.runner, full, answer_tokens)
            if len(ids) < answer_tokens:
                skipped += 1
                continue
            for variant in variants:
                prefilled = engine.prefill(prompt, method=method, answer_tokens=answer_tokens)
                records[variant].append(_follow(engine.runner, prefilled, (ids, logits), variant))
            run.keep(_data(name, ratio, skipped, records))
    unhealed = [answer.kl for answer in records[0, 0.0]]
    if not unhealed:
        raise QCFuseError(f"all {skipped} answers have fewer than {answer_tokens} tokens; ask for fewer")
    columns = (
        "rows a step",
        "order",
        "n",
        f"KL, tokens {LATE}-{answer_tokens}",
        "less unhealed",
        "s a token",
        "healed",
    )
    table = Table(*columns)
    for variant, answers in records.items():
        table.add_row(
            str(variant[0]),
            _order(variant),
            str(len(answers)),
            f"{fmean(answer.kl for answer in answers):.4f}",
            difference_cell([answer.kl for answer in answers], unhealed),
            f"{median(answer.seconds for answer in answers):.3f}",
            f"{fmean(answer.healed for answer in answers):.0%}",
        )
    return StudyResult(
        _data(name, ratio, skipped, records), [table, f"{skipped} answers were shorter and were left out"]
    )


@dataclass(frozen=True, slots=True)
class HealedAnswer:
    """An answer over a cache that heals.

    Attributes:
        kl: mean divergence of its tokens from `LATE` on, in nats a token.
        seconds: mean of a step.
        healed: share of the prompt's tokens that are exact at the end.
    """

    kl: float
    seconds: float
    healed: float


def _follow(
    runner: ModelRunner, prefilled: Prefilled, full: tuple[tuple[int, ...], Tensor], variant: tuple[int, float]
) -> HealedAnswer:
    """Follow full prefill's answer over a cache that heals.

    A variant is the number of rows a step, and the share of the reused tokens that are computed first, by attention.
    """
    rows, attended = variant
    ids, logits = full
    healing, divergences, seconds = Healing(runner, prefilled, attended), [], []
    for index in range(1, len(ids)):
        started = time.perf_counter()
        after = healing.step(ids[:index], rows)
        seconds.append(time.perf_counter() - started)
        divergences.append(divergence(logits[index], after))
    healed = min(1.0, healing.healed / len(prefilled.prompt))
    return HealedAnswer(fmean(divergences[LATE - 1 :]), fmean(seconds), healed)


def _order(variant: tuple[int, float]) -> str:
    rows, attended = variant
    if not rows:
        return "-"
    return "most attended first" if attended else "ascending"


def _data(
    model: str, ratio: float, skipped: int, records: dict[tuple[int, float], list[HealedAnswer]]
) -> dict[str, Any]:
    """Return the study's figures as plain data."""
    variants = [
        {"rows": variant[0], "order": _order(variant), "answers": [asdict(answer) for answer in answers]}
        for variant, answers in records.items()
    ]
    return {"model": model, "ratio": ratio, "skipped": skipped, "variants": variants}
