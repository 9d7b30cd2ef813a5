"""Quality of each method on the demonstration corpus: answers, and how far the first token is from full prefill's.

    python benchmarks/quality.py [--model M] [--top-k 8] [--json]

Retrieval is MiniLM over whole documents. Every method sees the same token ids. Intervals are 95 % bootstrap intervals
over questions. The corpus is small and the default model has 135M parameters: differences of one or two answers mean
nothing, the divergences do.
"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from qcfuse_rag import FusionEngine, SamplingParams, TextStream, make_method
from qcfuse_rag.bundled import corpus, default_embedder, default_model, questions
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.store.prefill_base import BLIND, FRAMED

METHODS = [
    make_method("full"),
    *(make_method("reuse", base=base) for base in (BLIND, FRAMED)),
    make_method("random", ratio=0.15, base=FRAMED),
    make_method("epic", ratio=0.15, base=FRAMED),
    make_method("prophetkv", ratio=0.15, base=FRAMED),
    make_method("qcfuse", ratio=0.05, base=FRAMED),
    *(make_method("qcfuse", ratio=ratio, base=base) for ratio in (0.15, 0.5) for base in (BLIND, FRAMED)),
    *(make_method("auto", ratio=ratio, guard=False) for ratio in (0.05, 0.15, 0.5)),  # every question is to be fused
]
PARAMS = SamplingParams(max_new_tokens=24)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean."""
    sample = np.random.default_rng(0).choice(values, (4000, len(values))).mean(1)
    low, high = np.quantile(sample, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    from qcfuse_rag.retrieval.embedder import Embedder

    engine = FusionEngine.load(options.model or default_model())
    texts = corpus()
    engine.warm(texts.values(), bases=dict.fromkeys(base for method in METHODS for base in method.bases))
    embed = Embedder(default_embedder())
    vectors = embed(list(texts.values()))

    found: dict[int, list[dict[str, float]]] = {i: [] for i in range(len(METHODS))}
    for question in track(questions(), "asking", console=Console(stderr=True)):
        order = np.argsort(-(vectors @ embed([question.question])[0]), kind="stable")[: options.top_k]
        prompt = engine.prompt(question.question, [list(texts.values())[i] for i in order])
        oracle = None
        for i, method in enumerate(METHODS):
            prefilled = engine.prefill(prompt, method=method, answer_tokens=PARAMS.max_new_tokens)
            logits = prefilled.logits
            oracle = logits if oracle is None else oracle
            answer = TextStream(engine.lm, prefilled, PARAMS).result()
            correct = any(expected.lower() in answer.text.lower() for expected in question.answers)
            found[i].append(
                {
                    "kl": divergence(oracle, logits),
                    "same_first_token": float(logits.argmax() == oracle.argmax()),
                    "correct": float(correct),
                    "ttft_s": answer.report.timings.ttft_s,
                }
            )

    rows = []
    for i, method in enumerate(METHODS):
        kl = [row["kl"] for row in found[i]]
        rows.append(
            {
                "method": method.name,
                "base": method.base.name if method.base else None,
                "ratio": method.ratio,
                "kl": statistics.fmean(kl),
                "kl_interval": interval(kl),
                "same_first_token": statistics.fmean(row["same_first_token"] for row in found[i]),
                "correct": int(sum(row["correct"] for row in found[i])),
                "questions": len(found[i]),
                "ttft_s": statistics.median(row["ttft_s"] for row in found[i]),
            }
        )
    if options.json:
        print(json.dumps({"model": engine.lm.name, "top_k": options.top_k, "methods": rows}, indent=2))
        return
    table = Table("method", "base", "ratio", "KL", "95 %", "same first token", "correct", "TTFT")
    for row in rows:
        low, high = row["kl_interval"]
        table.add_row(
            row["method"],
            row["base"] or "-",
            f"{row['ratio']:g}",
            f"{row['kl']:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{row['same_first_token']:.0%}",
            f"{row['correct']}/{row['questions']}",
            f"{row['ttft_s']:.2f} s",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
