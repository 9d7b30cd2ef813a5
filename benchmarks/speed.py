"""Time to first token against context length, beside transformers' own prefill and the arithmetic floor.

    python benchmarks/speed.py [--model M] [--tokens 1000 2000 4000] [--repeats 5] [--device D] [--dtype T] [--json]

All sides run in one process and take turns, round after round; figures are medians. `floor` is the time the rows'
matrix products and attention would take at the rate measured here for one large matrix product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from qcfuse_rag import FRAMED, FusionEngine, LanguageModel, make_method
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.demo.assets import corpus, default_model
from qcfuse_rag.fuse.self_check import stock_attention

METHODS = [
    make_method("full"),
    make_method("reuse", base=FRAMED),
    *(make_method("qcfuse", ratio=ratio, base=FRAMED) for ratio in (0.05, 0.15, 0.3, 0.5)),
    make_method("prophetkv", ratio=0.15, base=FRAMED),
]


def seconds(lm: LanguageModel, run: Callable[[], object]) -> float:
    """Time one call, device included."""
    if lm.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if lm.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def matmul_rate(lm: LanguageModel) -> float:
    """Return floating-point operations a second of a large matrix product in the model's dtype."""
    size = 8192 if lm.device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, dtype=lm.dtype, device=lm.device) for _ in range(2))
    times = sorted(seconds(lm, lambda: a @ b) for _ in range(9))
    return float(2 * size**3 / times[4])


def operations(lm: LanguageModel, rows: int, tokens: int) -> float:
    """Return the floating-point operations of computing `rows` evenly spread rows of a prompt of `tokens`."""
    config = lm.model.config.get_text_config()
    embeddings = lm.model.get_input_embeddings().weight.numel()
    tied = config.tie_word_embeddings
    parameters = sum(p.numel() for p in lm.model.parameters()) - embeddings * (1 if tied else 2)
    attention = 4 * lm.n_layers * config.num_attention_heads * lm.shapes[0].key_dim * tokens / 2
    return rows * (2 * parameters + attention) + 2 * embeddings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    engine = FusionEngine.load(options.model or default_model(), device=options.device, dtype=options.dtype)
    lm, passages = engine.lm, list(corpus().values())
    engine.warm(passages, bases=(FRAMED,))
    rate = matmul_rate(lm)
    results = []
    for wanted in options.tokens:
        chosen: list[str] = []
        while sum(len(engine.prompts.chunk_ids(text)) for text in chosen) < wanted:
            chosen.append(passages[len(chosen) % len(passages)])
        prompt = engine.prompt("Who founded Brinemoor Salt Works?", chosen)
        ids = torch.tensor([prompt.ids], device=lm.device)

        @torch.inference_mode()
        def stock(ids: torch.Tensor = ids) -> None:
            lm.model(input_ids=ids, logits_to_keep=1)

        times: dict[str, list[float]] = {"transformers": []} | {str(i): [] for i in range(len(METHODS))}
        for turn in range(options.repeats + 1):
            with stock_attention(lm):
                taken = {"transformers": seconds(lm, stock)}
            for i, method in enumerate(METHODS):
                done = engine.prefill(prompt, method=method)
                taken[str(i)] = done.report.timings.ttft_s
                if turn == 0:
                    report = done.report
                    results.append({"tokens": len(prompt), "index": str(i), "report": report})
            if turn:  # the first round warms up
                for name, value in taken.items():
                    times[name].append(value)
        full = statistics.median(times["0"])
        for row in results:
            if row["tokens"] == len(prompt):
                report, own = row.pop("report"), times[row.pop("index")]
                row |= {
                    "method": report.method,
                    "ratio": report.ratio,
                    "rows": report.rows,
                    "ttft_s": statistics.median(own),
                    "spread_s": max(own) - min(own),
                    "speedup": full / statistics.median(own),
                    "floor_s": operations(lm, report.rows, len(prompt)) / rate,
                    "transformers_s": statistics.median(times["transformers"]),
                    "bytes_loaded": report.bytes_loaded,
                    "stages": {k: round(v, 4) for k, v in report.to_dict()["timings"].items()},
                }
    if options.json:
        summary = {"model": lm.name, "device": str(lm.device), "dtype": lm.fingerprint.dtype, "matmul_flops": rate}
        print(json.dumps({**summary, "threads": torch.get_num_threads(), "results": results}, indent=2))
        return
    table = Table("prompt", "method", "rows", "TTFT", "spread", "faster than full", "floor", "transformers")
    for row in results:
        table.add_row(
            f"{row['tokens']:,}",
            f"{row['method']} {row['ratio']:g}",
            f"{row['rows']:,}",
            f"{row['ttft_s']:.3f} s",
            f"{row['spread_s']:.3f} s",
            f"{row['speedup']:.1f}x",
            f"{row['floor_s']:.3f} s",
            f"{row['transformers_s']:.3f} s",
        )
    console = Console()
    console.print(table)
    console.print(f"{lm.device}, {lm.fingerprint.dtype}, {torch.get_num_threads()} threads, {rate / 1e9:,.0f} GFLOP/s")


if __name__ == "__main__":
    main()
