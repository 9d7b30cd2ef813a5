"""Loading of stored caches during the computation against loading before it, over stores of several speeds."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.table import Table

from benchmarks.speed.ceilings import take_turns
from benchmarks.speed.measure import random_prompt
from benchmarks.speed.tiers import ThrottledStore, fill
from benchmarks.studies.runner import StudyResult, load_model
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import prefill
from qcfuse_rag.fusion.report import Timings
from qcfuse_rag.methods import make_method
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import KVStore
from qcfuse_rag.store.backends.disk import DiskStore
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore

RATIOS = (0.05, 0.2)


def loading(model: str | None = None, tokens: int = 4096, repeats: int = 5) -> StudyResult:
    """Compare loading during the computation with loading before it, over stores of several speeds.

    Both sides take turns in one process over the same prompt. Loading is the time that a request waits for its store,
    with placement.
    """
    lm = load_model(model)
    rows = []
    table = Table("store", "ratio", "load first", "of it load", "load during", "of it load", "times as fast")
    with tempfile.TemporaryDirectory() as folder, DiskStore(Path(folder), limit_bytes=UNLIMITED) as disk:
        stores: dict[str, KVStore] = {
            "memory": MemoryStore(UNLIMITED),
            "disk, in the page cache": disk,
            "1 GB/s": ThrottledStore(1e9),
            "200 MB/s": ThrottledStore(2e8),
        }
        methods = [make_method("auto", guard=False, ratio=ratio) for ratio in RATIOS]
        prompt = random_prompt(lm, tokens, 512, torch.Generator().manual_seed(0))
        fill(lm, list(stores.values()), prompt, methods)
        for name, store in stores.items():
            before = ModelRunner(lm, store, load_limit_s=None, overlap=False, max_spare_bytes=0)
            during = ModelRunner(lm, store)
            for method in methods:
                sides = {
                    "first": partial(_timings, before, prompt, method),
                    "during": partial(_timings, during, prompt, method),
                }
                turns = take_turns(sides, repeats)
                row = {"store": name, "ratio": method.ratio}
                for side, timings in turns.items():
                    row[f"{side}_s"] = median(timing.ttft_s for timing in timings)
                    row[f"{side}_load_s"] = median(timing.load_s for timing in timings)
                pairs = zip(turns["first"], turns["during"], strict=True)
                row["times_as_fast"] = median(first.ttft_s / second.ttft_s for first, second in pairs)
                rows.append(row)
                seconds = [f"{row[key]:.3f} s" for key in ("first_s", "first_load_s", "during_s", "during_load_s")]
                table.add_row(name, f"{method.ratio:g}", *seconds, f"{row['times_as_fast']:.2f}")
    return StudyResult({"model": lm.name, "prompt": len(prompt), "rows": rows}, [table])


def _timings(runner: ModelRunner, prompt: Prompt, method: Method) -> Timings:
    return prefill(runner, prompt, method).report.timings
