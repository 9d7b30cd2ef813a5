"""Many asynchronous questions on one engine: are all answered right, and does the event loop stay free?

    python benchmarks/concurrency.py [--model M] [--requests 32] [--max-new-tokens 16] [--json]

Each question is asked alone first, one after the other; then all at once, as the frameworks' classes ask. Meanwhile a
clock on the event loop notes how late it wakes. Then one long request is cancelled in the midst of others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from qcfuse_rag import FusionEngine, SamplingParams
from qcfuse_rag.bundled import corpus, default_model
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.engine.engine_handle import EngineHandle

TICK_S = 0.005


async def clock(lags: list[float]) -> None:
    """Note by how much the event loop is late, until cancelled."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - before - TICK_S)


async def measure(engine: FusionEngine, requests: int, params: SamplingParams) -> dict[str, Any]:
    """Ask alone, together, and with one that is cancelled."""
    served, texts = EngineHandle.wrap(engine), list(corpus().values())
    asked = [
        ("What is this about?", [texts[n % 28], texts[(n + 9) % 28], texts[(n + 17) % 28]]) for n in range(requests)
    ]

    async def one(number: int, settings: SamplingParams = params) -> tuple[int, ...]:
        question, passages = asked[number]
        answer = await served.asubmit(lambda own: (own.prompt(f"{question} ({number})", passages), settings))
        return (await answer.aresult()).ids

    await one(0)
    began = time.perf_counter()
    alone = [await one(number) for number in range(requests)]
    alone_s = time.perf_counter() - began

    lags: list[float] = []
    ticking = asyncio.create_task(clock(lags))
    began = time.perf_counter()
    together = await asyncio.gather(*(one(number) for number in range(requests)))
    together_s = time.perf_counter() - began
    ticking.cancel()

    long = asyncio.create_task(one(0, SamplingParams(max_new_tokens=2000)))
    others = [asyncio.create_task(one(number)) for number in range(1, 5)]
    while served.scheduler.active < 2:
        await asyncio.sleep(TICK_S)
    long.cancel()
    began = time.perf_counter()
    await asyncio.gather(*others)
    while served.scheduler.active:
        await asyncio.sleep(TICK_S)
    cancelled_s = time.perf_counter() - began
    served.close()
    lags.sort()
    return {
        "requests": requests,
        "same": sum(mine == yours for mine, yours in zip(alone, together, strict=True)),
        "alone_s": alone_s,
        "together_s": together_s,
        "lag_ms": {name: 1000 * lags[int(len(lags) * share)] for name, share in (("p50", 0.5), ("p99", 0.99))},
        "lag_max_ms": 1000 * lags[-1],
        "free_after_cancel_s": cancelled_s,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    quiet_libraries()
    with FusionEngine.load(given.model or default_model(), device="cpu", verdict="ignore") as engine:
        engine.warm(corpus().values())
        result = asyncio.run(measure(engine, given.requests, SamplingParams(max_new_tokens=given.max_new_tokens)))
    if given.json:
        print(json.dumps(result))
        return
    table = Table("what", "figure")
    for name, value in result.items():
        table.add_row(name.replace("_", " "), str(value) if isinstance(value, int | dict) else f"{value:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
