"""Many asynchronous questions on one engine: equal answers, and a responsive event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rich.table import Table

from benchmarks.studies.runner import StudyResult, load_model
from qcfuse_rag.bundled import corpus
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.engine.engine_handle import EngineHandle
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore

TICK_S = 0.005
QUESTION = "What is this about?"


def concurrency(model: str | None = None, requests: int = 32, max_new_tokens: int = 16) -> StudyResult:
    """Ask many asynchronous questions at once: are all answers equal, and does the event loop stay responsive?

    Each question is first asked alone; then all questions are asked at once, as the frameworks' classes do. Meanwhile a
    clock on the event loop notes how late it wakes. Then a long request is cancelled while others run.
    """
    with FusionEngine(load_model(model), MemoryStore(UNLIMITED)) as engine:
        engine.warm(corpus().values())
        data = asyncio.run(_measure(engine, requests, SamplingParams(max_new_tokens=max_new_tokens)))
    table = Table("what", "figure")
    for name, value in data.items():
        table.add_row(name.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value))
    return StudyResult(data, [table])


async def _measure(engine: FusionEngine, requests: int, params: SamplingParams) -> dict[str, Any]:
    served, texts = EngineHandle.wrap(engine), list(corpus().values())
    count = len(texts)
    passages = [[texts[n % count], texts[(n + 9) % count], texts[(n + 17) % count]] for n in range(requests)]

    async def ask(number: int, params: SamplingParams = params) -> tuple[int, ...]:
        question = f"{QUESTION} ({number})"
        answer = await served.asubmit(lambda engine: (engine.prompt(question, passages[number]), params))
        return (await answer.aresult()).ids

    await ask(0)
    started = time.perf_counter()
    alone = [await ask(number) for number in range(requests)]
    alone_s = time.perf_counter() - started

    lags: list[float] = []
    clock = asyncio.create_task(_note_lags(lags))
    started = time.perf_counter()
    together = await asyncio.gather(*(ask(number) for number in range(requests)))
    together_s = time.perf_counter() - started
    clock.cancel()

    long_request = asyncio.create_task(ask(0, SamplingParams(max_new_tokens=2000)))
    others = [asyncio.create_task(ask(number)) for number in range(1, min(5, requests))]
    while served.scheduler.active < 2 and not long_request.done():
        await asyncio.sleep(TICK_S)
    long_request.cancel()
    started = time.perf_counter()
    await asyncio.gather(*others)
    while served.scheduler.active:
        await asyncio.sleep(TICK_S)
    free_after_cancel_s = time.perf_counter() - started
    served.close()
    lags.sort()
    return {
        "requests": requests,
        "same": sum(first == second for first, second in zip(alone, together, strict=True)),
        "alone_s": alone_s,
        "together_s": together_s,
        "lag_ms": {name: 1000 * lags[int(len(lags) * share)] for name, share in (("p50", 0.5), ("p99", 0.99))},
        "lag_max_ms": 1000 * lags[-1],
        "free_after_cancel_s": free_after_cancel_s,
    }


async def _note_lags(lags: list[float]) -> None:
    """Note the seconds by which the event loop wakes late, until cancelled."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - before - TICK_S)
