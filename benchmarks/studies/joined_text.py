"""Passages kept apart against passages found in a text that a framework has joined."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from rich.table import Table

from benchmarks.quality.summary import mean_interval
from benchmarks.studies.runner import FULL_PREFILL, StudyResult, StudyRun, demo_questions, load_engine
from qcfuse_rag.bundled import corpus
from qcfuse_rag.methods import make_method
from qcfuse_rag.verification.divergence import divergence

JOINED = "Context information is below.\n-----\n{context}\n-----\nAnswer the query.\nQuery: {question}\nAnswer: "


def joined_text(run: StudyRun, model: str | None = None, top_k: int = 3, ratio: float = 0.05) -> StudyResult:
    """Compare passages kept apart with passages found in a joined text, each with full prefill of the same prompt.

    Asks the demonstration's questions over whole documents, retrieved by MiniLM. Apart: the engine's own prompt, with
    passages after the system prefix that they were warmed for. Found: the text of LlamaIndex's question prompt, in
    which the passages are located. KL is of the first token, from full prefill of the same prompt, in nats; brackets
    are 95 % bootstrap intervals over questions.
    """
    method = make_method("auto", ratio=ratio, guard=False)
    sides: dict[str, list[dict[str, float]]] = {"apart": [], "found in a text": []}
    samples = demo_questions(top_k)
    with load_engine(model) as engine:
        name = engine.lm.name
        engine.warm(corpus().values(), bases=method.bases)
        for sample in run.track(samples):
            context = "\n\n".join(text.strip() for text in sample.passages)
            text = JOINED.format(context=context, question=sample.question)
            apart = engine.prompt(sample.question, sample.passages)
            for rows, prompt in zip(sides.values(), (apart, engine.prompt_from_text([("user", text)])), strict=True):
                full, fused = (engine.prefill(prompt, method=chosen) for chosen in (FULL_PREFILL, method))
                row = {
                    "kl": divergence(full.logits, fused.logits),
                    "reused": fused.report.reused_tokens / len(prompt),
                    "rows": fused.report.rows,
                    "speedup": full.report.timings.ttft_s / fused.report.timings.ttft_s,
                }
                rows.append(row)
    data: dict[str, Any] = {"model": name, "questions": len(samples)}
    table = Table("passages", "KL", "tokens reused", "rows", "sooner than full")
    for side, rows in sides.items():
        interval = mean_interval([row["kl"] for row in rows])
        line = {"kl": interval["mean"], "kl_low": interval["low"], "kl_high": interval["high"]}
        line |= {key: fmean(row[key] for row in rows) for key in ("reused", "rows")}
        line["speedup"] = median(row["speedup"] for row in rows)
        data[side] = line
        kl = f"{line['kl']:.3f} [{line['kl_low']:.3f}, {line['kl_high']:.3f}]"
        table.add_row(side, kl, f"{line['reused']:.0%}", f"{line['rows']:.0f}", f"{line['speedup']:.1f}x")
    return StudyResult(data, [table])
