"""Healing while an answer is decoded: how near its tokens come to full prefill's, and what a token then costs."""

from __future__ import annotations

import time
from statistics import fmean, median

from rich.table import Table

from qcfuse_rag.bundled import corpus
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.evaluation.studies.runner import FULL, StudyResult, StudyRun, difference_cell, load_engine
from qcfuse_rag.fusion.healing import Healing
from qcfuse_rag.generation.teacher_forcing import greedy_answer
from qcfuse_rag.methods import make_method
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.verification.checks import fit_cases

LATE = 8
"""The first answer token that is counted: healing has hardly begun before it."""


def healing(
    run: StudyRun,
    model: str | None = None,
    size: int = 30,
    ratio: float = 0.05,
    answer_tokens: int = 64,
    rows: str = "0,16,64",
) -> StudyResult:
    """Compare an answer over a cache that heals, so many rows a step, with full prefill's and with an unhealed cache.

    Questions about the demonstration's documents, four in a prompt, whose greedy answer by full prefill has at least
    `--answer-tokens` tokens. All steps follow that answer. KL is that of its tokens from the eighth on, in nats a
    token; differences to the unhealed cache (0 rows) are paired, with 95 % bootstrap intervals.
    """
    counts = sorted({0, *(int(count) for count in rows.split(","))})
    kl: dict[int, list[float]] = {count: [] for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    healed: dict[int, list[float]] = {count: [] for count in counts}
    skipped = 0
    method = make_method("auto", ratio=ratio, guard=False)
    with load_engine(model) as engine:
        name = engine.lm.name
        for case in run.track(fit_cases(list(corpus().values()), size)):
            engine.warm(case.passages)
            prompt = engine.prompt(case.question, case.passages)
            full = engine.prefill(prompt, method=FULL, answer_tokens=answer_tokens)
            ids, logits = greedy_answer(engine.runner, full, answer_tokens)
            if len(ids) < answer_tokens:
                skipped += 1
                continue
            for count in counts:
                prefilled = engine.prefill(prompt, method=method, answer_tokens=answer_tokens)
                following, steps = Healing(engine.runner, prefilled), []
                divergences = []
                for index in range(1, answer_tokens):
                    started = time.perf_counter()
                    after = following.step(ids[:index], count)
                    steps.append(time.perf_counter() - started)
                    divergences.append(divergence(logits[index], after))
                kl[count].append(fmean(divergences[LATE - 1 :]))
                seconds[count].append(fmean(steps))
                healed[count].append(min(1.0, following.healed / len(prompt)))
            run.keep({"kl": kl, "seconds": seconds, "healed": healed})
    if not kl[0]:
        raise QCFuseError(f"all {skipped} answers have fewer than {answer_tokens} tokens; ask for fewer")
    table = Table("rows a step", "n", f"KL, tokens {LATE}-{answer_tokens}", "less unhealed", "s a token", "healed")
    for count in counts:
        table.add_row(
            str(count),
            str(len(kl[count])),
            f"{fmean(kl[count]):.4f}",
            difference_cell(kl[count], kl[0]),
            f"{median(seconds[count]):.3f}",
            f"{fmean(healed[count]):.0%}",
        )
    data = {"model": name, "ratio": ratio, "skipped": skipped, "kl": kl, "seconds": seconds, "healed": healed}
    return StudyResult(data, [table, f"{skipped} answers were shorter and were left out"])
