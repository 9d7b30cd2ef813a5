"""Primers of different lengths: what `auto` leaves of full prefill's answers over caches that were primed with each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import fmean

from rich.table import Table

from benchmarks.studies.runner import (
    FULL_PREFILL,
    DataFiles,
    StudyResult,
    StudyRun,
    difference_cell,
    load_engine,
)
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.generation.teacher_forcing import greedy_answer
from qcfuse_rag.ingestion.primer import PRIMER, primer_ids
from qcfuse_rag.ingestion.target import Ids, PrefillTarget
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.methods import make_method
from qcfuse_rag.store.prefill_base import FRAMED, PRIMED
from qcfuse_rag.verification.divergence import compare_greedy_answers
from qcfuse_rag.verification.samples import Sample

LENGTHS = (1, 2, 4, len(PRIMER))
"""Numbers of passages; the last ones of the primer are taken."""
OF_LIBRARY = 4
"""Passages of the library itself, taken from other questions."""


def primers(run: StudyRun, files: DataFiles, ratio: float = 0.15, answer_tokens: int = 24) -> StudyResult:
    """Compare primers of one to eight fixed passages, and of the library's own, by whole answers of `auto`.

    Divergences run along full prefill's greedy answer, in nats a token. Differences are to one passage and paired, with
    95 % bootstrap intervals. Passages of the library are those of other questions of the same files.
    """
    method = make_method("auto", ratio=ratio, guard=False)
    figures: dict[str, dict[str, list[float]]] = {}
    with load_engine(files.model) as engine:
        name, samples = engine.lm.name, files.examples()
        for sample in run.track(samples):
            prompt = engine.prompt(sample.question, sample.passages)
            full = engine.prefill(prompt, method=FULL_PREFILL, answer_tokens=answer_tokens)
            answer = greedy_answer(engine.runner, full, answer_tokens)
            del full
            for primer_name, primer in _primers(engine, samples, sample).items():
                engine.store.clear()
                target = PrefillTarget(engine.lm, engine.store, engine.prompts.prefix_ids, primer)
                WarmJob(target, map(engine.prompts.chunk_ids, sample.passages), bases=(PRIMED, FRAMED)).run()
                fused = engine.prefill(prompt, method=method, answer_tokens=answer_tokens)
                [compared] = compare_greedy_answers(engine.runner, [answer], [fused], answer_tokens)
                values = {"tokens": float(len(primer)), **compared.divergence.summary()}
                for figure, value in values.items():
                    figures.setdefault(primer_name, {}).setdefault(figure, []).append(value)
            run.keep(figures)
    return StudyResult({"model": name, "ratio": ratio, "figures": figures}, [_table(figures)])


def _primers(engine: FusionEngine, samples: Sequence[Sample], sample: Sample) -> dict[str, Ids]:
    """Return the primers to compare for the prompt of a sample, by name."""
    context_tokens = engine.lm.context_window.tokens
    fixed = [engine.prompts.chunk_ids(passage) for passage in PRIMER]
    others = dict.fromkeys(text for other in samples for text in other.passages if text not in sample.passages)
    own = [engine.prompts.chunk_ids(text) for text in islice(others, OF_LIBRARY)]
    lengths = {f"{length} fixed": primer_ids(fixed[-length:], context_tokens) for length in LENGTHS}
    return {**lengths, f"{len(own)} of the library": primer_ids(own, context_tokens)} if own else lengths


def _table(figures: dict[str, dict[str, list[float]]]) -> Table:
    table = Table("primer", "tokens", "n", "KL", "less one fixed", "first KL", "top-1", "identical")
    shortest = next(iter(figures.values()))
    for name, values in figures.items():
        table.add_row(
            name,
            f"{fmean(values['tokens']):.0f}",
            str(len(values["answer_kl"])),
            f"{fmean(values['answer_kl']):.4f}",
            difference_cell(values["answer_kl"], shortest["answer_kl"]) if values is not shortest else "-",
            f"{fmean(values['first_kl']):.4f}",
            f"{fmean(values['top1']):.3f}",
            f"{fmean(values['identical']):.3f}",
        )
    return table
