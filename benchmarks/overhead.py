"""Where a fused prefill's time goes on a CPU: matrix products and attention, or anything else.

    python benchmarks/overhead.py [--model M] [--tokens 4096] [--method auto] [--ratio 0.05] [--json]

One prefill under torch's profiler, after two that warm up; shares are of the wall time of the call. `python` is what
no operator of torch accounts for.
"""

from __future__ import annotations

import argparse
import json
import time

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

KINDS = {
    "attention": ("scaled_dot_product", "_softmax", "bmm", "masked_fill"),
    "matrix products": ("mm", "addmm"),
    "copies": ("copy_", "cat", "index", "clone", "contiguous"),
}


def kind_of(name: str) -> str:
    """Return what an operator's time is spent on."""
    plain = name.removeprefix("aten::").lstrip("_")
    for kind, beginnings in KINDS.items():
        if any(plain == one.lstrip("_") or (len(one) > 5 and plain.startswith(one.lstrip("_"))) for one in beginnings):
            return kind
    return "elementwise and other operators"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    quiet_libraries()
    lm = LanguageModel.load(given.model or default_model(), device="cpu")
    method, store = make_method(given.method, ratio=given.ratio), MemoryStore(1 << 40)
    prompt = random_prompt(lm, given.tokens, 512, torch.Generator().manual_seed(0))
    fill(lm, {"memory": store}, prompt, [method])
    loading = Loading(lm)
    for _ in range(2):
        plain = prefill(lm, store, prompt, method, loading=loading).report
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        started = time.perf_counter()
        prefill(lm, store, prompt, method, loading=loading)
        wall = time.perf_counter() - started
    shares = dict.fromkeys([*KINDS, "elementwise and other operators"], 0.0)
    for event in watched.key_averages():
        if event.key.startswith("aten::"):
            shares[kind_of(event.key)] += event.self_cpu_time_total / 1e6 / wall
    shares["python"] = 1 - sum(shares.values())
    found = {
        "model": lm.name,
        "tokens": len(prompt),
        "rows": plain.rows,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "plain_s": plain.timings.ttft_s,
        "profiled_s": wall,
        "shares": shares,
        "outside": 1 - shares["attention"] - shares["matrix products"],
    }
    if given.json:
        print(json.dumps(found, indent=1))
        return
    table = Table("spent on", "share")
    for kind, share in shares.items():
        table.add_row(kind, f"{share:.1%}")
    console = Console()
    console.print(table)
    console.print(
        f"{found['rows']} rows of {found['tokens']:,}, {found['threads']} threads: {wall:.3f} s under the profiler, "
        f"{plain.timings.ttft_s:.3f} s without; outside attention and matrix products {found['outside']:.1%}"
    )


if __name__ == "__main__":
    main()
