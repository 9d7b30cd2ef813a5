"""Where a fused prefill's time goes on a CPU: matrix products and attention, or anything else.

    python benchmarks/overhead.py [--model M] [--tokens 4096] [--method auto] [--ratio 0.05] [--rounds 5] [--json]

Prefills under torch's profiler, medians of the rounds after one that warms up. `python` is what no operator accounts
for, and what the profiler takes to note each of them. Beside it stands transformers' own prefill of as many tokens as
there were rows, with none before them, by which to judge how much of the rest is the model's own code.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from qcfuse_rag import LanguageModel, MemoryStore, make_method
from qcfuse_rag.bench.speed.measure import fill, random_prompt
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.demo.assets import default_model
from qcfuse_rag.fuse.loading import Loading
from qcfuse_rag.fuse.prefill import prefill
from qcfuse_rag.fuse.self_check import stock_attention

KINDS = {
    "attention": ("scaled_dot_product", "_softmax", "bmm", "masked_fill"),
    "matrix products": ("mm", "addmm"),
    "copies": ("copy_", "cat", "index", "clone", "contiguous"),
}
REST = "elementwise and other operators"


def kind_of(name: str) -> str:
    """Return what an operator's time is spent on."""
    plain = name.removeprefix("aten::").lstrip("_")
    for kind, beginnings in KINDS.items():
        if any(plain == one.lstrip("_") or (len(one) > 5 and plain.startswith(one.lstrip("_"))) for one in beginnings):
            return kind
    return REST


def spent(call: Callable[[], object]) -> dict[str, float]:
    """Return the seconds a call takes and what they are spent on."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        started = time.perf_counter()
        call()
        wall = time.perf_counter() - started
    by_kind = dict.fromkeys([*KINDS, REST], 0.0)
    for event in watched.key_averages():
        if event.key.startswith("aten::"):
            by_kind[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    outside = wall - by_kind["attention"] - by_kind["matrix products"]
    return {**by_kind, "python": wall - sum(by_kind.values()), "all": wall, "outside": outside}


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Return for each call the medians of what `spent` says of it; calls take turns."""
    found = [{name: spent(call) for name, call in calls.items()} for _ in range(rounds + 1)][1:]
    return {name: {kind: median(one[name][kind] for one in found) for kind in found[0][name]} for name in calls}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    quiet_libraries()
    lm = LanguageModel.load(given.model or default_model(), device="cpu")
    method, store = make_method(given.method, ratio=given.ratio), MemoryStore(1 << 40)
    prompt = random_prompt(lm, given.tokens, 512, torch.Generator().manual_seed(0))
    fill(lm, {"memory": store}, prompt, [method])
    fused = partial(prefill, lm, store, prompt, method, loading=Loading(lm))
    rows = fused().report.rows
    ids = torch.tensor([prompt.ids[:rows]])

    def stock() -> None:
        with stock_attention(lm), torch.inference_mode():
            lm.model(input_ids=ids, use_cache=True, logits_to_keep=1)

    found: dict[str, Any] = {
        "model": lm.name,
        "tokens": len(prompt),
        "rows": rows,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": measure({"fused": fused, "transformers": stock}, given.rounds),
    }
    if given.json:
        print(json.dumps(found, indent=1))
        return
    ours, theirs = found["seconds"]["fused"], found["seconds"]["transformers"]
    table = Table("spent on", "fused", "share", f"transformers, {rows} tokens alone")
    for kind, seconds in ours.items():
        table.add_row(kind, f"{seconds:.3f} s", f"{seconds / ours['all']:.1%}", f"{theirs[kind]:.3f} s")
    console = Console()
    console.print(table)
    console.print(
        f"{rows} rows of {len(prompt):,}, {found['threads']} threads; outside attention and matrix products "
        f"{ours['outside'] / ours['all']:.1%}, and {(ours['outside'] - theirs['outside']) / ours['all']:.1%} "
        "more than transformers spends there on as many tokens"
    )


if __name__ == "__main__":
    main()
