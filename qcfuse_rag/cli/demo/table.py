"""The demonstration's table: answers and seconds of full prefill and of the fused answers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from qcfuse_rag.cli.demo.pair import AnsweredPair, TimedAnswer


def summarise(pairs: Sequence[AnsweredPair]) -> dict[str, Any]:
    """Return counts of answers, and medians of seconds and tokens."""
    return {
        "questions": len(pairs),
        "same": sum(pair.same for pair in pairs),
        "full": _side([pair.full for pair in pairs]),
        "fused": _side([pair.fused for pair in pairs]),
    }


def summary_table(totals: dict[str, Any]) -> Table:
    """Return the table; it fits 80 columns."""
    full, fused, count = totals["full"], totals["fused"], totals["questions"]
    table = Table(title=f"\n{count} question{'s' if count != 1 else ''}", title_justify="left")
    table.add_column("")
    for name in ("full prefill", "qcfuse", ""):
        table.add_column(name, justify="right")
    if full["right"] is not None:
        table.add_row("right answers", f"{full['right']} of {count}", f"{fused['right']} of {count}", "")
    table.add_row("the same answer", "", f"{totals['same']} of {count}", "")
    for label, name in (("time to first token, median", "ttft_s"), ("whole answer, median", "total_s")):
        sooner = f"{full[name] / fused[name]:.1f} times sooner"
        table.add_row(label, f"{full[name]:.2f} s", f"{fused[name]:.2f} s", sooner)
    table.add_row("prompt tokens computed, median", f"{full['rows']:,.0f}", f"{fused['rows']:,.0f}", "")
    return table


def _side(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    known = [answer.right for answer in answers if answer.right is not None]
    return {
        "right": sum(known) if known else None,
        "ttft_s": median(answer.ttft_s or 0.0 for answer in answers),
        "total_s": median(answer.total_s or 0.0 for answer in answers),
        "rows": median(answer.report.rows if answer.report else 0 for answer in answers),
    }
