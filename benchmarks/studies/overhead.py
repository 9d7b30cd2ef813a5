"""The share of a fused prefill's CPU time outside matrix products and attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from rich.table import Table
from torch.nn import functional

from benchmarks.speed.ceilings import take_turns
from benchmarks.speed.measure import random_prompt
from benchmarks.speed.tiers import fill
from benchmarks.studies.runner import StudyResult, load_model
from qcfuse_rag.fusion import probes
from qcfuse_rag.fusion.pipeline import prefill
from qcfuse_rag.methods import make_method
from qcfuse_rag.runtime.attention.scores import attention_weights
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.memory import UNLIMITED, MemoryStore
from qcfuse_rag.verification.exactness import stock_attention

TIMED_FUNCTIONS: tuple[tuple[str, ModuleType, Callable[..., Any]], ...] = (
    ("attention", functional, functional.scaled_dot_product_attention),
    ("the probe's scores", probes, attention_weights),
    ("matrix products", functional, functional.linear),
)
"""The kinds of computation, and the functions that do them in their modules."""


def overhead(
    model: str | None = None, tokens: int = 4096, method: str = "auto", ratio: float = 0.05, rounds: int = 15
) -> StudyResult:
    """Measure where the time of a fused prefill goes on a CPU: matrix products and attention, or other work.

    Linear layers, attention and the probe's scores, which are attention weights, are timed where they are called, in
    the same prefills that are timed as a whole. Figures are medians of the rounds after a warm-up round. `loading` is
    finding stored caches and placing them. transformers' own prefill of as many tokens as there were rows takes turns
    with it, which shows how much of the rest is the model's own code.
    """
    lm = load_model(model)
    chosen, store = make_method(method, ratio=ratio).unguarded, MemoryStore(UNLIMITED)
    prompt = random_prompt(lm, tokens, 512, torch.Generator().manual_seed(0))
    fill(lm, [store], prompt, [chosen])
    runner = ModelRunner(lm, store)
    rows = prefill(runner, prompt, chosen).report.rows
    ids = torch.tensor([prompt.ids[:rows]])

    def fused() -> float:
        return prefill(runner, prompt, chosen).report.timings.load_s

    def stock() -> float:
        with torch.inference_mode():
            lm.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return 0.0

    rounds_of = take_turns(
        {
            "fused": partial(_time_kinds, fused, nullcontext),
            "transformers": partial(_time_kinds, stock, partial(stock_attention, lm)),
        },
        rounds,
    )
    seconds = {
        side: {kind: median(times[kind] for times in results) for kind in results[0]}
        for side, results in rounds_of.items()
    }
    engine, transformers = seconds.values()
    table = Table("spent on", "fused", "share", f"transformers, {rows} tokens alone")
    for kind, kind_s in engine.items():
        table.add_row(kind, f"{kind_s:.3f} s", f"{kind_s / engine['all']:.1%}", f"{transformers[kind]:.3f} s")
    line = (
        f"{rows} rows of {len(prompt):,}, {torch.get_num_threads()} threads; outside attention and matrix products "
        f"{engine['outside'] / engine['all']:.1%}, and "
        f"{(engine['outside'] - transformers['outside']) / engine['all']:.1%} "
        "more than transformers spends there on as many tokens"
    )
    return StudyResult({"model": lm.name, "tokens": len(prompt), "rows": rows, "seconds": seconds}, [table, line])


def _time_kinds(call: Callable[[], float], around: Callable[[], AbstractContextManager[object]]) -> dict[str, float]:
    """Return the seconds of a call by kind of computation; the call returns its seconds of loading."""
    with around(), _timed() as by_kind:
        started = time.perf_counter()
        loading = call()
        total = time.perf_counter() - started
    outside = total - sum(by_kind.values())
    return {**by_kind, "loading": loading, "the rest": outside - loading, "all": total, "outside": outside}


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    seconds = {kind: 0.0 for kind, _, _ in TIMED_FUNCTIONS}

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[kind] += time.perf_counter() - started
            return result

        return call

    with ExitStack() as patches:
        for kind, module, function in TIMED_FUNCTIONS:
            patches.enter_context(mock.patch.object(module, function.__name__, timed(kind, function)))
        yield seconds
