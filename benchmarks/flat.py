"""What it costs that a framework joins passages into one text: apart against found in it, each against full prefill.

    python benchmarks/flat.py [--model M] [--top-k 3] [--ratio 0.05] [--json]

The demonstration's questions over whole documents, retrieved by MiniLM. Apart: the engine's own prompt, passages behind
the head they were warmed for. Found: the text of LlamaIndex's question prompt, in which they are located. KL is of the
first token, from full prefill of the same prompt, in nats; brackets are 95 % bootstrap intervals over questions.
"""

from __future__ import annotations

import argparse
import json
from statistics import fmean, median

import numpy as np
from rich.console import Console
from rich.table import Table

from qcfuse_rag import FusionEngine, make_method
from qcfuse_rag.bundled import corpus, default_embedder, default_model, questions
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.retrieval.embedder import Embedder

FULL = make_method("full")
FLAT = "Context information is below.\n-----\n{context}\n-----\nAnswer the query.\nQuery: {question}\nAnswer: "


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--top-k", type=int, default=3)
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    quiet_libraries()
    method = make_method("auto", ratio=given.ratio, guard=False)
    engine = FusionEngine.load(given.model or default_model(), method=method, verdict="ignore")
    texts = list(corpus().values())
    engine.warm(texts)
    embed = Embedder(default_embedder())
    vectors = embed(texts)
    found: dict[str, list[dict[str, float]]] = {"apart": [], "found in a text": []}
    for question in questions():
        nearest = np.argsort(-(vectors @ embed([question.question])[0]))[: given.top_k]
        chosen = [texts[place] for place in nearest]
        flat = FLAT.format(context="\n\n".join(text.strip() for text in chosen), question=question.question)
        prompts = (engine.prompt(question.question, chosen), engine.prompt_from_text([("user", flat)]))
        for rows, prompt in zip(found.values(), prompts, strict=True):
            full, fused = (engine.prefill(prompt, method=how) for how in (FULL, method))
            rows.append(
                {
                    "kl": divergence(full.logits, fused.logits),
                    "reused": fused.report.reused_tokens / len(prompt),
                    "rows": fused.report.rows,
                    "speedup": full.report.timings.ttft_s / fused.report.timings.ttft_s,
                }
            )
    generator = np.random.default_rng(0)
    result = {}
    for name, rows in found.items():
        drawn = generator.choice([row["kl"] for row in rows], (4000, len(rows))).mean(1)
        result[name] = {key: fmean(row[key] for row in rows) for key in ("kl", "reused", "rows")}
        result[name] |= {"kl_low": float(np.quantile(drawn, 0.025)), "kl_high": float(np.quantile(drawn, 0.975))}
        result[name]["speedup"] = median(row["speedup"] for row in rows)
    if given.json:
        print(json.dumps({"model": engine.lm.name, "questions": len(questions()), **result}))
        return
    table = Table("passages", "KL", "tokens reused", "rows", "sooner than full")
    for name, row in result.items():
        kl = f"{row['kl']:.3f} [{row['kl_low']:.3f}, {row['kl_high']:.3f}]"
        table.add_row(name, kl, f"{row['reused']:.0%}", f"{row['rows']:.0f}", f"{row['speedup']:.1f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
