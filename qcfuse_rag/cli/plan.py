"""`qcfuse plan`: what a corpus would take, before there is one."""

from __future__ import annotations

import math

from rich.table import Table

from qcfuse_rag.cli.console import OUT, duration, print_json, size, status
from qcfuse_rag.evaluation.capacity import HERE, NUMBERS, Sizing, rates_here, rates_of, shape_of, size_up


def plan_corpus(
    nodes: int,
    tokens: int,
    model: str,
    gpu: str,
    retrieved: int,
    ratio: float,
    numbers: str,
    reached: float,
    caches: int,
    *,
    as_json: bool,
) -> None:
    """Print bytes, hours, uses until it pays, and the time to the first token from each tier."""
    shape = shape_of(model)
    if gpu == HERE:
        with status("measuring this machine"):
            rates = rates_here()
    else:
        rates = rates_of(gpu, reached=reached)
    about = {"nodes": nodes, "tokens": tokens, "retrieved": retrieved, "caches": caches}
    found = size_up(shape, rates, **about, ratio=ratio, number_bytes=NUMBERS[numbers])
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found, nodes, tokens, model, gpu, retrieved, ratio, caches)


def _print(
    found: Sizing, nodes: int, tokens: int, model: str, gpu: str, retrieved: int, ratio: float, caches: int
) -> None:
    warming = duration(3600 * found.warming_hours)
    OUT.print(
        f"{nodes:,} passages of {tokens} tokens, {model}, {gpu}: {size(found.corpus_bytes)} "
        f"({caches} caches of each, {found.kv_bytes_per_token / 1024:.0f} KiB a token), "
        f"{warming} of warming on one machine",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    uses = found.break_even_uses
    paid = "warming never pays at this ratio"
    if uses < math.inf:
        paid = f"in computing time, a passage has paid for its warming when it was retrieved {uses:.1f} times"
    OUT.print(
        f"{paid}; a prompt of {retrieved} takes {_seconds(found.full_ttft_s)} to its first token without a store",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("tier", "loading", f"computing at {ratio:g}", "first token", "times as fast", box=None)
    for name, tier in found.tiers.items():
        row = (_seconds(tier.load_s), _seconds(tier.compute_s), _seconds(tier.ttft_s), f"{tier.times_as_fast:.1f}")
        table.add_row(name, *row)
    OUT.print(table)
    OUT.print(f"rates: {found.rates.source}. Floors, with loading and computing side by side.", highlight=False)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
