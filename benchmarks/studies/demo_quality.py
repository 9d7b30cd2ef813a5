"""Answers of methods on the demonstration corpus, and their distance from full prefill's."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from rich.table import Table

from benchmarks.quality.summary import mean_interval
from benchmarks.studies.runner import FULL_PREFILL, StudyResult, StudyRun, demo_questions, load_engine
from qcfuse_rag.methods import make_method
from qcfuse_rag.store.prefill_base import BLIND, FRAMED
from qcfuse_rag.verification.cases import string_match
from qcfuse_rag.verification.divergence import answer_text, compare_greedy_answers, greedy_answer

METHODS = [
    FULL_PREFILL,
    *(make_method("reuse", base=base) for base in (BLIND, FRAMED)),
    make_method("random", ratio=0.15, base=FRAMED),
    make_method("epic", ratio=0.15, base=FRAMED),
    make_method("prophetkv", ratio=0.15, base=FRAMED),
    make_method("qcfuse", ratio=0.05, base=FRAMED),
    *(make_method("qcfuse", ratio=ratio, base=base) for ratio in (0.15, 0.5) for base in (BLIND, FRAMED)),
    *(make_method("auto", ratio=ratio, guard=False) for ratio in (0.05, 0.15, 0.5)),  # every question is fused
]
ANSWER_TOKENS = 24
MEANS = ("same_first_token", "answer_kl", "top1", "identical")
COLUMNS = {
    "method": "{method}", "base": "{base}", "ratio": "{ratio:g}", "KL": "{first_kl:.3f}",
    "95 %": "{first_kl_interval[0]:.3f}-{first_kl_interval[1]:.3f}", "same first token": "{same_first_token:.0%}",
    "answer KL": "{answer_kl:.3f}", "top-1": "{top1:.3f}", "identical": "{identical:.0%}",
    "correct": "{correct}/{questions}", "TTFT": "{ttft_s:.2f} s",
}  # fmt: skip


def demo_quality(run: StudyRun, model: str | None = None, top_k: int = 8) -> StudyResult:
    """Compare the answers of methods on the demonstration corpus with full prefill's, and their first token.

    KL and its interval are of the first token; answer KL is the mean along full prefill's greedy answer, in nats a
    token, top-1 the share of its tokens that are predicted, and identical the share of the same answers. MiniLM
    retrieves whole documents. Every method sees the same token ids. Intervals are 95 % bootstrap intervals over
    questions. The corpus is small and the default model has 135M parameters: differences of one or two answers mean
    nothing, the divergences do.
    """
    bases = list(dict.fromkeys(base for method in METHODS for base in method.bases))
    answers: list[list[dict[str, float]]] = [[] for _ in METHODS]
    with load_engine(model) as engine:
        name = engine.lm.name
        for sample in run.track(demo_questions(top_k)):
            engine.warm(sample.passages, bases=bases)
            prompt = engine.prompt(sample.question, sample.passages)
            exact = engine.prefill(prompt, method=FULL_PREFILL, answer_tokens=ANSWER_TOKENS)
            full = greedy_answer(engine.runner, exact, ANSWER_TOKENS)
            del exact
            for method, rows in zip(METHODS, answers, strict=True):
                prefilled = engine.prefill(prompt, method=method, answer_tokens=ANSWER_TOKENS)
                [compared] = compare_greedy_answers(engine.runner, [full], [prefilled], ANSWER_TOKENS)
                text = answer_text(engine.lm, compared.ids or ())
                row = {
                    **compared.divergence.summary(),
                    "same_first_token": float(compared.divergence.agrees[0]),
                    "correct": string_match(text, sample.answers, needs_all=False),
                    "ttft_s": prefilled.report.timings.ttft_s,
                }
                rows.append(row)
    data: dict[str, Any] = {"model": name, "top_k": top_k, "methods": []}
    table = Table(*COLUMNS)
    for method, rows in zip(METHODS, answers, strict=True):
        interval = mean_interval([row["first_kl"] for row in rows])
        line: dict[str, Any] = {
            "method": method.name,
            "base": method.base.name if method.base else None,
            "ratio": method.ratio,
            "first_kl": interval["mean"],
            "first_kl_interval": (interval["low"], interval["high"]),
            **{name: fmean(row[name] for row in rows) for name in MEANS},
            "correct": int(sum(row["correct"] for row in rows)),
            "questions": len(rows),
            "ttft_s": median(row["ttft_s"] for row in rows),
        }
        data["methods"].append(line)
        table.add_row(*(cell.format_map({**line, "base": line["base"] or "-"}) for cell in COLUMNS.values()))
    return StudyResult(data, [table])
