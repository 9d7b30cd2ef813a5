"""`qcfuse plan`: estimate the size, cost and speed of a corpus before it is warmed."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from qcfuse_rag.cli.capacity import HERE, NUMBERS, CorpusPlan, Sizing, rates_here, rates_of, shape_of, size_up
from qcfuse_rag.cli.console import OUT, duration, print_json, print_line, size, status
from qcfuse_rag.cli.options import PlanOptions


def plan_corpus(options: PlanOptions, *, as_json: bool) -> None:
    """Print bytes, warming hours, break-even uses, and the time to the first token from each tier."""
    shape = shape_of(options.model)
    if options.gpu == HERE:
        with status("measuring this machine"):
            rates = rates_here()
    else:
        rates = rates_of(options.gpu, reached=options.reached)
    plan = CorpusPlan(
        nodes=options.nodes,
        tokens=options.tokens,
        retrieved=options.retrieved,
        ratio=options.ratio,
        number_bytes=NUMBERS[options.numbers],
        caches=options.caches,
    )
    sizing = size_up(shape, rates, plan)
    if as_json:
        print_json(asdict(sizing))
    else:
        _print_sizing(sizing, options)


def _print_sizing(sizing: Sizing, options: PlanOptions) -> None:
    warming, per_token = duration(3600 * sizing.warming_hours), sizing.kv_bytes_per_token / 1024
    print_line(
        f"{options.nodes:,} passages of {options.tokens} tokens, {options.model}, {options.gpu}: "
        f"{size(sizing.corpus_bytes)} ({options.caches} caches of each, {per_token:.0f} KiB per token), "
        f"{warming} of warming on one machine"
    )
    uses, break_even = sizing.break_even_uses, "warming never pays off at this ratio"
    if uses is not None:
        break_even = f"in computing time, warming a passage pays off after {uses:.1f} retrievals"
    print_line(
        f"{break_even}; without a store, the first token of a prompt of {options.retrieved} passages takes "
        f"{_seconds(sizing.full_ttft_s)}"
    )
    table = Table("tier", "loading", f"computing at {options.ratio:g}", "first token", "times as fast", box=None)
    for name, tier in sizing.tiers.items():
        row = (_seconds(tier.load_s), _seconds(tier.compute_s), _seconds(tier.ttft_s), f"{tier.times_as_fast:.1f}")
        table.add_row(name, *row)
    OUT.print(table)
    print_line(f"rates: {sizing.rates.source}. Lower bounds, with loading and computing in parallel.")


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
