"""Time to first token of `auto` beside full prefill's: where it should gain most, and where it must not lose.

    python benchmarks/guard.py [--model M] [--repeats 7] [--only CASE] [--json FILE]

Both sides run in turns in one process, on the same token ids. Prompts are cut from the demonstration corpus: long ones,
short ones, one of which nothing is stored, some over a store that reads 50 MB a second, and one whose ratio is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from qcfuse_rag import FusionEngine, MemoryStore, Method, Prompt, make_method
from qcfuse_rag.bundled import corpus, default_model
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.evaluation.speed.tiers import ThrottledStore
from qcfuse_rag.store.backends.base import Miss

BYTES_PER_S = 50e6
FULL = make_method("full")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    quiet_libraries()
    fast = FusionEngine.load(given.model or default_model(), store=MemoryStore(1 << 40), method=make_method("auto"))
    slow = FusionEngine(fast.lm, ThrottledStore(BYTES_PER_S), method=make_method("auto"))
    passages = [part for text in corpus().values() for part in text.split("\n\n") if len(part) > 80]
    while len(fast.prompt("", passages)) > 4200:
        passages.pop()
    fast.warm(passages)
    for entry in fast.store.entries():
        found = fast.store.open(entry.address)
        if not isinstance(found, Miss):
            slow.store.put(*found)
    for engine in (fast, slow):
        engine.runner.costs()
    cold = FusionEngine(fast.lm, MemoryStore(1 << 40), method=make_method("auto"))
    ones = make_method("auto", ratio=1.0)
    cases: list[tuple[str, FusionEngine, int, Method | None]] = [
        ("4k tokens, in memory", fast, 4096, None),
        ("1k tokens, in memory", fast, 1024, None),
        *((f"short, {tokens} tokens", fast, tokens, None) for tokens in (64, 128, 192, 256)),
        ("nothing stored", cold, 1024, None),
        ("50 MB a second, 256 tokens", slow, 256, None),
        ("50 MB a second, 1k", slow, 1024, None),
        ("50 MB a second, 4k", slow, 4096, None),
        ("ratio 1", fast, 1024, ones),
    ]
    rows = [
        measure(name, engine, cut(engine, passages, tokens), method, given.repeats)
        for name, engine, tokens, method in cases
        if name.startswith(given.only)
    ]
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1), "utf-8")
    table = Table("case", "tokens", "full", "auto", "auto / full", "rows", "decided")
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['tokens']:,}",
            f"{row['full_s']:.3f} s",
            f"{row['auto_s']:.3f} s",
            f"{row['ratio']:.3f}",
            str(row["rows"]),
            row["decided"],
        )
    Console(width=150).print(table, f"{torch.get_num_threads()} threads, medians of {given.repeats}")


def cut(engine: FusionEngine, passages: list[str], tokens: int) -> Prompt:
    """Return a prompt of about so many tokens, as many whole passages as go into it; at least one."""
    question = "Which ship is the larger one?"
    chosen: list[str] = []
    for passage in passages:
        if chosen and len(engine.prompt(question, [*chosen, passage])) > tokens:
            break
        chosen.append(passage if tokens >= 256 else " ".join(passage.split()[: max(4, (tokens - 60) // 2)]))
    if tokens < 256:
        engine.warm(chosen)
    return engine.prompt(question, chosen)


def measure(name: str, engine: FusionEngine, prompt: Prompt, method: Method | None, repeats: int) -> dict[str, object]:
    """Time both sides in turns, after one round to warm up."""
    times: dict[str, list[float]] = {"full": [], "auto": []}
    for round_ in range(repeats + 1):
        for side, chosen in (("full", FULL), ("auto", method)):
            started = time.perf_counter()
            done = engine.prefill(prompt, method=chosen)
            if round_:
                times[side].append(time.perf_counter() - started)
    full, auto = (statistics.median(times[side]) for side in ("full", "auto"))
    report = done.report
    return {
        "case": name,
        "tokens": len(prompt),
        "full_s": full,
        "auto_s": auto,
        "ratio": auto / full,
        "rows": report.rows,
        "decided": report.fallback or "fused",
        "times": times,
    }


if __name__ == "__main__":
    main()
