"""Compare the seconds to the first token that the guard's costs predict with what came, question by question.

Questions over the demonstration's documents, of mixed lengths, some of them computed in full. The costs begin with what
warming teaches.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from typer import Option

from benchmarks.options import ModelOptions
from benchmarks.runner import Report, Run, Table, about_model, machine_conditions
from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.methods import make_method
from qcfuse_rag.store.factory import open_store

PASSAGES = (2, 5, 1, 8, 3, 6)
"""Passages of the prompts, in turn."""
FULL_EVERY = 4
"""Of so many prompts one is computed in full, whatever the guard thinks."""
CLOSE = 1.5
"""The largest factor between a prediction and what came that counts as close."""
ANSWER_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Options of the measurement."""

    questions: Annotated[int, Option(min=1, help="Number of questions.")] = 40
    documents: Annotated[int, Option(min=1, help="Number of warmed documents.")] = 16
    busy: Annotated[bool, Option(help="Run beside a process that takes a core.")] = False


def measure(options: Options, run: Run) -> None:
    """Ask questions; record the predicted and the measured time to the first token of each."""
    lm, texts, noise = options.load_model(), list(corpus().values())[: options.documents], random.Random(0)
    run.begin(about_model(lm), {**machine_conditions(lm), "busy": options.busy, "documents": len(texts)})
    full, with_guard = make_method("full"), make_method("auto")
    with tempfile.TemporaryDirectory() as folder, open_store(folder) as store, other_work(options.busy):
        engine = FusionEngine(lm, store, method=with_guard)
        engine.warm(texts)
        for number in range(options.questions):
            count = min(PASSAGES[number % len(PASSAGES)], len(texts))
            prompt = engine.prompt(f"What does part {number} of it say?", noise.sample(texts, count))
            chosen, costs = full if number % FULL_EVERY == FULL_EVERY - 1 else with_guard, engine.runner.costs()
            report = engine.generate(prompt, SamplingParams(max_new_tokens=ANSWER_TOKENS), method=chosen).report
            in_full = costs.full_pass_s(len(prompt)) if costs is not None and chosen is full else None
            way = "in full" if report.base is None else "fused"
            record = {"tokens": len(prompt), "way": way, "seconds": report.timings.ttft_s}
            run.add(("question", number), {**record, "predicted_s": report.predicted_s or in_full})
            run.progress(number + 1, options.questions)


@contextmanager
def other_work(busy: bool) -> Iterator[None]:
    """Keep a process spinning meanwhile."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    if busy:
        process.start()
    try:
        yield
    finally:
        if busy:
            process.kill()


def _spin() -> None:
    while True:
        pass


def report(run: Run) -> Report:
    """Return how many predictions were close, and the median and extremes of what came over what was predicted."""
    rows, summary = [], {}
    records = [record for _, record in run.of("question") if record["predicted_s"]]
    for way in ("all", "fused", "in full"):
        chosen = [record for record in records if way in ("all", record["way"])]
        ratios = sorted(record["seconds"] / record["predicted_s"] for record in chosen)
        if ratios:
            share = sum(1 / CLOSE <= ratio <= CLOSE for ratio in ratios) / len(ratios)
            summary[way] = {"questions": len(ratios), "close": share, "median": median(ratios), "ratios": ratios}
            extremes = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            rows.append([way, str(len(ratios)), f"{share:.0%}", f"{median(ratios):.2f}", extremes])
    columns = ("case", "questions", f"within {CLOSE}", "median came / predicted", "range")
    title = "Seconds to the first token" + (", beside a busy process" if run.conditions.get("busy") else "")
    return Report(summary, [Table(title, columns, rows)])
