"""Time to first token of `auto` beside full prefill's, where fusion should help and where it should not be slower."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table

from benchmarks.speed.ceilings import take_turns
from benchmarks.speed.tiers import ThrottledStore, copy_entries
from benchmarks.studies.runner import FULL_PREFILL, StudyResult, StudyRun, load_engine
from qcfuse_rag.bundled import paragraphs
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.methods import make_method
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore

BYTES_PER_S = 50e6
QUESTION = "Which ship is the larger one?"
AUTO = make_method("auto")


def guard(run: StudyRun, model: str | None = None, repeats: int = 7, only: str = "") -> StudyResult:
    """Time `auto` beside full prefill, in cases where fusion should help and in cases where it should not be slower.

    Both sides take turns in one process, on the same token ids. Prompts are cut from the demonstration corpus: long and
    short prompts, a prompt without stored passages, prompts over a store that reads 50 MB a second, and a prompt whose
    ratio is 1. `--only` keeps the cases whose name begins with it.
    """
    fast = load_engine(model)
    passages = paragraphs()
    while len(fast.prompt("", passages)) > 4200:
        passages.pop()
    fast.warm(passages, bases=AUTO.bases)
    slow = FusionEngine(fast.lm, ThrottledStore(BYTES_PER_S))
    copy_entries(fast.store, slow.store)
    for engine in (fast, slow):
        engine.runner.costs()
    cold = FusionEngine(fast.lm, MemoryStore(UNLIMITED))
    cases: list[tuple[str, FusionEngine, int, Method]] = [
        ("4k tokens, in memory", fast, 4096, AUTO),
        ("1k tokens, in memory", fast, 1024, AUTO),
        *((f"short, {tokens} tokens", fast, tokens, AUTO) for tokens in (64, 128, 192, 256)),
        ("nothing stored", cold, 1024, AUTO),
        ("50 MB a second, 256 tokens", slow, 256, AUTO),
        ("50 MB a second, 1k", slow, 1024, AUTO),
        ("50 MB a second, 4k", slow, 4096, AUTO),
        ("ratio 1", fast, 1024, make_method("auto", ratio=1.0)),
    ]
    rows = []
    table = Table("case", "tokens", "full", "auto", "auto / full", "rows", "decided")
    for name, engine, tokens, method in cases:
        if not name.startswith(only):
            continue
        row = {"case": name, **_measure(engine, _prompt(engine, passages, tokens), method, repeats)}
        rows.append(row)
        run.keep({"rows": rows})
        times = [f"{row['full_s']:.3f} s", f"{row['auto_s']:.3f} s", f"{row['auto_to_full']:.3f}"]
        table.add_row(name, f"{row['tokens']:,}", *times, str(row["rows"]), row["decided"])
    return StudyResult({"rows": rows}, [table, f"{torch.get_num_threads()} threads, medians of {repeats}"])


def _prompt(engine: FusionEngine, passages: list[str], tokens: int) -> Prompt:
    """Return a prompt of about `tokens` tokens: at least one passage, and no more whole passages than fit."""
    chosen: list[str] = []
    for passage in passages:
        if chosen and len(engine.prompt(QUESTION, [*chosen, passage])) > tokens:
            break
        chosen.append(passage if tokens >= 256 else " ".join(passage.split()[: max(4, (tokens - 60) // 2)]))
    if tokens < 256:
        engine.warm(chosen, bases=AUTO.bases)
    return engine.prompt(QUESTION, chosen)


def _measure(engine: FusionEngine, prompt: Prompt, method: Method, repeats: int) -> dict[str, Any]:
    def seconds(method: Method) -> float:
        started = time.perf_counter()
        engine.prefill(prompt, method=method)
        return time.perf_counter() - started

    times = take_turns({"full": partial(seconds, FULL_PREFILL), "auto": partial(seconds, method)}, repeats)
    full_s, auto_s = (median(times[side]) for side in ("full", "auto"))
    report = engine.prefill(prompt, method=method).report
    return {
        "tokens": len(prompt),
        "full_s": full_s,
        "auto_s": auto_s,
        "auto_to_full": auto_s / full_s,
        "rows": report.rows,
        "decided": report.fallback or "fused",
        "times": times,
    }
