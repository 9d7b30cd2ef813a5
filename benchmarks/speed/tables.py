"""The result of a speed measurement as Markdown, as tables for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.quality.tables import figures, markdown_table, new_figure
from qcfuse_rag.fusion.method import IN_FULL
from qcfuse_rag.store.quantization import LOSSLESS

PREFILL = (
    ("context", lambda r: f"{r['context']:,}"),
    ("method", lambda r: r["method"]),
    ("ratio", lambda r: "-" if r["ratio"] is None else f"{r['ratio']:g}"),
    ("tier", lambda r: _tier(r)),
    ("rows", lambda r: f"{r['rows']:,}"),
    ("TTFT", lambda r: f"{1000 * r['ttft_s']:,.1f} ms"),
    ("spread", lambda r: f"{1000 * r['spread_s']:,.1f}"),
    ("full / it", lambda r: f"{r['speedup']:.1f}x"),
    ("transformers / it", lambda r: f"{r['speedup_transformers']:.1f}x"),
    ("calculated / it", lambda r: f"{r['speedup_calculated']:.1f}x"),
    ("guard", lambda r: _guard(r)),
    ("arithmetic", lambda r: f"{1000 * r['arithmetic_s']:,.1f} ms"),
    ("loading", lambda r: f"{1000 * r['loading_s']:,.1f} ms"),
    ("of the floor", lambda r: f"{r['of_floor']:.2f}"),
    ("load / probe / recompute", lambda r: " / ".join(f"{1000 * s:,.1f}" for s in r["stages_s"].values())),
    ("memory over buffer", lambda r: _memory_over_buffer(r)),
)
DECODE = (
    ("context", lambda r: f"{r['context']:,}"),
    ("requests", lambda r: f"{r['requests']}"),
    ("step", lambda r: _step(r["step_s"])),
    ("transformers", lambda r: _step(r["transformers_step_s"])),
    ("its cache", lambda r: f"{r['transformers_cache'] or ''}"),
    ("tokens a second", lambda r: f"{r['tokens_per_s']:,.1f}"),
    ("its bytes", lambda r: f"{1000 * r['bytes_s']:,.1f} ms"),
    ("of the floor", lambda r: f"{r['of_floor']:.2f}"),
)
NARROW = {"context", "method", "ratio", "tier", "rows", "TTFT", "full / it"}
NARROW_DECODE = {"context", "requests", "step", "transformers", "tokens a second"}
WIDE_COLUMNS = 270  # least width of a terminal that fits all columns


def markdown(result: Mapping[str, Any]) -> str:
    """Return a page with the machine, the ceilings and both tables."""
    about, ceilings = result["about"], result["ceilings"]
    lines = [
        f"`{about['command']}`, {about['date']}, {about['device']}, {about['dtype']}, {about['threads']} threads, "
        f"torch {about['torch']}, kernels: {about['kernels']}.",
        "",
        f"Measured ceilings: {ceilings['flops'] / 1e9:,.0f} GFLOP/s, memory {ceilings['memory_bytes_s'] / 1e9:,.1f} "
        f"GB/s, loading {ceilings['loading_bytes_s'] / 1e9:,.1f} GB/s. Keys and values take "
        f"{result['kv_bytes_per_token']:,} bytes a token. Calculated: full prefill's operations at those GFLOP/s.",
    ]
    for columns, rows in ((PREFILL, result["prefill"]), (DECODE, result["decode"])):
        cells = [[show(row) for _, show in columns] for row in rows]
        lines += ["", markdown_table([name for name, _ in columns], cells)]
    return "\n".join(lines) + "\n"


def terminal_tables(result: Mapping[str, Any], width: int) -> list[Table]:
    """Return both tables with the columns that fit a terminal of this width."""
    tables = []
    for title, columns, narrow in (("prefill", PREFILL, NARROW), ("decode", DECODE, NARROW_DECODE)):
        chosen = columns if width >= WIDE_COLUMNS else [column for column in columns if column[0] in narrow]
        rows = ([show(row) for _, show in chosen] for row in result[title])
        tables.append(figures(title, [name for name, _ in chosen], rows))
    return tables


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw time to first token against context: one line for each method, ratio and tier, its lower bound dotted."""
    figure, axes = new_figure(9, 5.5)
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["prefill"]:
        ratio = "" if row["ratio"] is None else f" {row['ratio']:g}"
        name = row["method"] if row["tier"] == "-" else f"{row['method']}{ratio}, {_tier(row)}"
        lines.setdefault(name, []).append(row)
    for index, (name, rows) in enumerate(lines.items()):
        contexts = [row["context"] for row in rows]
        axes.plot(contexts, [row["ttft_s"] for row in rows], "o-", color=f"C{index % 10}", label=name)
        floors = [max(row["arithmetic_s"], row["loading_s"]) for row in rows]
        axes.plot(contexts, floors, ":", color=f"C{index % 10}")
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="time to first token, s")
    axes.set_title(f"{result['about']['model']} on {result['about']['device']}; dotted: the floor")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _memory_over_buffer(row: Mapping[str, Any]) -> str:
    return f"{(row['peak_bytes'] - row['buffer_bytes']) / 1e6:+,.0f} MB of {row['buffer_bytes'] / 1e6:,.0f}"


def _guard(row: Mapping[str, Any]) -> str:
    """Return what the method's guard decided, and the time that it predicted."""
    if row["predicted_s"] is None:
        return "-"
    refused = (row["fallback"] or "").startswith(IN_FULL)
    return f"{'in full' if refused else 'fuses'}, {1000 * row['predicted_s']:,.1f} ms"


def _step(step_s: float | None) -> str:
    return "" if step_s is None else f"{1000 * step_s:,.1f} ms"


def _tier(row: Mapping[str, Any]) -> str:
    return str(row["tier"]) if row["numbers"] == LOSSLESS else f"{row['tier']} {row['numbers']}"
