"""A picture of a fused prefill: the prompt's text, coloured by what became of each token."""

from __future__ import annotations

from html import escape
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from qcfuse_rag.prompt.segments import Prompt, Span
from qcfuse_rag.report.fusion import FusionReport

STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
section { white-space: pre-wrap; border-left: 4px solid #ddd; margin: .6rem 0; padding: .1rem .8rem }
section.question, section.text { border-color: #4a7fd6 } section.missing { border-color: #d64a4a }
.reused { color: #888 } .recomputed { background: #ffd54a; color: #000 } .computed { color: #1c4fa3 }
small { color: #666 }
"""


def explain_html(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, report: FusionReport) -> str:
    """Draw which tokens were reused, which recomputed although stored, and which computed for lack of a cache.

    Args:
        tokenizer: the model's.
        prompt: the prompt.
        report: of its prefill.

    Returns:
        One HTML page without scripts or references to anything outside it. It contains the question.
    """
    timings = report.timings
    summary = (
        f"{report.method}, ratio {report.ratio:g}: {report.reused_tokens:,} tokens reused, {len(report.selected):,} "
        f"recomputed, {report.rows - len(report.selected):,} computed; first token after {timings.ttft_s:.2f} s "
        f"(load {timings.load_s:.2f}, probe {timings.probe_s:.2f}, recompute {timings.recompute_s:.2f})"
    )
    legend = "".join(f'<span class="{name}">{name}</span> ' for name in ("reused", "recomputed", "computed"))
    hits = {lookup.start for lookup in report.lookups if lookup.hit}
    reasons = {lookup.start: lookup.reason for lookup in report.lookups if not lookup.hit}
    body = "\n".join(_section(tokenizer, span, set(report.selected), hits, reasons) for span in prompt.spans)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>What was recomputed</title><style>{STYLE}</style>'
        f"<p>{escape(summary)}</p><p>{legend}</p>\n{body}</html>\n"
    )


def _section(
    tokenizer: PreTrainedTokenizerBase, span: Span, selected: set[int], hits: set[int], reasons: dict[int, str | None]
) -> str:
    def fate(position: int) -> str:
        if span.start not in hits:
            return "computed"
        return "recomputed" if position in selected else "reused"

    pieces = []
    for name, positions in groupby(range(span.start, span.stop), key=fate):
        ids = [span.segment.ids[position - span.start] for position in positions]
        pieces.append(f'<span class="{name}">{escape(tokenizer.decode(ids))}</span>')
    reason = reasons.get(span.start)
    note = f"<small>{escape(span.segment.role)}, {len(span)} tokens{': ' + escape(reason) if reason else ''}</small>\n"
    kind = "missing" if reason else str(span.segment.role)
    return f'<section class="{kind}">{note}{"".join(pieces)}</section>'
