"""Loading while computing against loading first, over stores of several speeds.

    python benchmarks/loading.py [--model M] [--tokens 4096] [--repeats 5] [--json]

Both sides take turns in one process over the same prompt. Loading is what a request waits for its store, with placing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import torch
from qcfuse_rag.runtime.loading.loading import Loading
from rich.console import Console
from rich.table import Table

from qcfuse_rag import DiskStore, KVStore, LanguageModel, MemoryStore, make_method
from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.evaluation.speed.measure import random_prompt
from qcfuse_rag.evaluation.speed.tiers import ThrottledStore
from qcfuse_rag.evaluation.speed.tiers import fill
from qcfuse_rag.fusion.pipeline import prefill

ROOM = 1 << 40
RATIOS = (0.05, 0.2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    quiet_libraries()
    lm = LanguageModel.load(given.model or default_model(), device="cpu")
    loading, rows = Loading(lm), []
    with tempfile.TemporaryDirectory() as folder, DiskStore(Path(folder), limit_bytes=ROOM) as disk:
        stores: dict[str, KVStore] = {
            "memory": MemoryStore(ROOM),
            "disk, in the page cache": disk,
            "1 GB/s": ThrottledStore(1e9),
            "200 MB/s": ThrottledStore(2e8),
        }
        methods = [make_method("auto", guard=False, ratio=ratio) for ratio in RATIOS]
        prompt = random_prompt(lm, given.tokens, 512, torch.Generator().manual_seed(0))
        fill(lm, list(stores.values()), prompt, methods)
        for name, store in stores.items():
            for method in methods:
                turns = [
                    [prefill(lm, store, prompt, method, loading=how).report.timings for how in (None, loading)]
                    for _ in range(given.repeats + 1)
                ][1:]  # the first warms up
                rows.append(
                    {
                        "store": name,
                        "ratio": method.ratio,
                        "first_s": median(first.ttft_s for first, _ in turns),
                        "first_load_s": median(first.load_s for first, _ in turns),
                        "during_s": median(during.ttft_s for _, during in turns),
                        "during_load_s": median(during.load_s for _, during in turns),
                        "times_as_fast": median(first.ttft_s / during.ttft_s for first, during in turns),
                    }
                )
    if given.json:
        print(json.dumps({"model": lm.name, "prompt": len(prompt), "threads": torch.get_num_threads(), "rows": rows}))
        return
    table = Table("store", "ratio", "load first", "of it load", "load during", "of it load", "times as fast")
    for row in rows:
        seconds = [f"{row[k]:.3f} s" for k in ("first_s", "first_load_s", "during_s", "during_load_s")]
        table.add_row(row["store"], f"{row['ratio']:g}", *seconds, f"{row['times_as_fast']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
