"""Where a fused prefill's time goes on a CPU: matrix products and attention, or anything else.

    python benchmarks/overhead.py [--model M] [--tokens 4096] [--method auto] [--ratio 0.05] [--rounds 15] [--json]

Linear layers, attention and the probe's scores, which are attention weights, are timed where they are called, in the
very prefills that are timed as a whole; medians of the rounds after one that warms up. `loading` is finding stored
caches and putting them where they belong. Beside it stand the same with attention by masks instead of rectangles, and
transformers' own prefill of as many tokens as there were rows, with none before them, by which to judge how much of the
rest is the model's own code.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from qcfuse_rag.runtime.loading.loading import Loading
from rich.console import Console
from rich.table import Table

from qcfuse_rag import LanguageModel, MemoryStore, make_method
from qcfuse_rag.bundled import default_model
from qcfuse_rag.cli.console import quiet_libraries
from qcfuse_rag.engine.exactness_check import stock_attention
from qcfuse_rag.evaluation.speed.measure import random_prompt
from qcfuse_rag.evaluation.speed.tiers import fill
from qcfuse_rag.fusion import probes as probe
from qcfuse_rag.fusion.pipeline import prefill
from qcfuse_rag.runtime.attention import dispatch as attention

KINDS = (
    ("attention", torch.nn.functional, "scaled_dot_product_attention"),
    ("attention", attention, "attend_in_rectangles"),
    ("the probe's scores", probe, "attention_weights"),
    ("matrix products", torch.nn.functional, "linear"),
)
"""What calls are spent on, and the function that does it."""


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Add up the seconds that each kind of computation takes."""
    spent = {kind: 0.0 for kind, _, _ in KINDS}

    def timing(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            spent[kind] += time.perf_counter() - started
            return result

        return call

    with ExitStack() as patches:
        for kind, home, name in KINDS:
            patches.enter_context(mock.patch.object(home, name, timing(kind, getattr(home, name))))
        yield spent


def spent(call: Callable[[], float]) -> dict[str, float]:
    """Return the seconds a call takes and what they are spent on; it returns the seconds it spent loading."""
    with timed() as by_kind:
        started = time.perf_counter()
        loading = call()
        wall = time.perf_counter() - started
    outside = wall - sum(by_kind.values())
    return {**by_kind, "loading": loading, "the rest": outside - loading, "all": wall, "outside": outside}


Side = tuple[Callable[[], AbstractContextManager[object]], Callable[[], float]]
"""What to do around a call, and the call."""


def measure(sides: dict[str, Side], rounds: int) -> dict[str, dict[str, float]]:
    """Return for each side the medians of what `spent` says of its call; sides take turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, (around, call) in sides.items():
            with around():
                one = spent(call)
            if turn:
                found[name].append(one)
    return {name: {kind: median(one[kind] for one in own) for kind in own[0]} for name, own in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    quiet_libraries()
    lm = LanguageModel.load(given.model or default_model(), device="cpu")
    method, store = make_method(given.method, ratio=given.ratio), MemoryStore(1 << 40)
    prompt = random_prompt(lm, given.tokens, 512, torch.Generator().manual_seed(0))
    fill(lm, [store], prompt, [method])
    run = partial(prefill, lm, store, prompt, method, loading=Loading(lm))
    rows = run().report.rows
    ids = torch.tensor([prompt.ids[:rows]])

    def fused() -> float:
        return run().report.timings.load_s

    def stock() -> float:
        with torch.inference_mode():
            lm.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return 0.0

    by_masks = partial(mock.patch.object, attention, "rectangles_take", lambda *_: False)
    sides: dict[str, Side] = {
        "fused": (nullcontext, fused),
        "by masks": (by_masks, fused),
        "transformers": (partial(stock_attention, lm), stock),
    }
    found: dict[str, Any] = {
        "model": lm.name,
        "tokens": len(prompt),
        "rows": rows,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": measure(sides, given.rounds),
    }
    if given.json:
        print(json.dumps(found, indent=1))
        return
    ours, masked, theirs = found["seconds"].values()
    table = Table("spent on", "fused", "share", "by masks", f"transformers, {rows} tokens alone")
    for kind, seconds in ours.items():
        others = (f"{one[kind]:.3f} s" for one in (masked, theirs))
        table.add_row(kind, f"{seconds:.3f} s", f"{seconds / ours['all']:.1%}", *others)
    console = Console()
    console.print(table)
    console.print(
        f"{rows} rows of {len(prompt):,}, {found['threads']} threads; outside attention and matrix products "
        f"{ours['outside'] / ours['all']:.1%}, and {(ours['outside'] - theirs['outside']) / ours['all']:.1%} "
        "more than transformers spends there on as many tokens"
    )


if __name__ == "__main__":
    main()
