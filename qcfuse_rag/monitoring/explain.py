"""A picture of a fused prefill: the prompt's text, coloured by what became of each token."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.fusion.report import FusionReport, Timings
from qcfuse_rag.prompts.segments import Prompt, Span

REPLACEMENT = "\ufffd"

STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
section { white-space: pre-wrap; border-left: 4px solid #ddd; margin: .6rem 0; padding: .1rem .8rem }
section.question, section.text { border-color: #4a7fd6 } section.missing { border-color: #d64a4a }
.reused { color: #888 } .recomputed { background: #ffd54a; color: #000 } .computed { color: #1c4fa3 }
small { color: #666 }
.timeline { display: flex; height: 1.6rem; font-size: 12px; line-height: 1.6rem; color: #fff; overflow: hidden }
.timeline span { padding-left: .3rem; white-space: nowrap; overflow: hidden }
.load { background: #3d7f77 } .probe { background: #4a7fd6 }
.select { background: #888 } .recompute { background: #b5651d }
.heat { display: inline-block; height: .6rem; background: #d64a4a; margin: 0 .4rem }
"""


def explain_html(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, report: FusionReport, scores: Tensor | None = None
) -> str:
    """Draw which tokens were reused, which recomputed although stored, and which computed for lack of a cache.

    Args:
        tokenizer: the model's.
        prompt: the prompt.
        report: of its prefill.
        scores: `[T]`, how much the probe looked at each token, to show each passage's share of it.

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
    heat = _heat(prompt, hits, scores)
    body = "\n".join(
        _section(tokenizer, span, set(report.selected), hits, reasons, heat.get(span.start)) for span in prompt.spans
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>What was recomputed</title><style>{STYLE}</style>'
        f"<p>{escape(summary)}</p>{_timeline(timings)}<p>{legend}</p>\n{body}</html>\n"
    )


def _timeline(timings: Timings) -> str:
    """Draw the stages, each as wide as its share of the time."""
    bars = "".join(
        f'<span class="{stage}" style="width:{100 * seconds / max(timings.ttft_s, 1e-9):.2f}%">{stage}</span>'
        for stage, seconds in timings.stages.items()
    )
    return f'<div class="timeline">{bars}</div>'


def _heat(prompt: Prompt, hits: set[int], scores: Tensor | None) -> dict[int, float]:
    """Return for each reused passage, by its position, its share of what the probe looked at."""
    if scores is None:
        return {}
    found = {span.start: float(scores[span.start : span.stop].sum()) for span in prompt.chunks if span.start in hits}
    total = sum(found.values())
    return {start: score / total for start, score in found.items()} if total > 0 else {}


def _section(
    tokenizer: PreTrainedTokenizerBase,
    span: Span,
    selected: set[int],
    hits: set[int],
    reasons: dict[int, str | None],
    heat: float | None,
) -> str:
    def fate(positions: range) -> str:
        if span.start not in hits:
            return "computed"
        return "recomputed" if any(position in selected for position in positions) else "reused"

    pieces = []
    for name, wholes in groupby(_wholes(tokenizer, span), key=fate):
        ids = [span.segment.ids[position - span.start] for whole in wholes for position in whole]
        pieces.append(f'<span class="{name}">{escape(tokenizer.decode(ids))}</span>')
    reason = reasons.get(span.start)
    bar = "" if heat is None else f', probed <span class="heat" style="width:{12 * heat:.2f}rem"></span>{heat:.0%}'
    why = f": {escape(reason)}" if reason else ""
    note = f"<small>{escape(span.segment.role)}, {len(span)} tokens{why}{bar}</small>\n"
    kind = "missing" if reason else str(span.segment.role)
    return f'<section class="{kind}">{note}{"".join(pieces)}</section>'


def _wholes(tokenizer: PreTrainedTokenizerBase, span: Span) -> Iterator[range]:
    """Yield a span's positions, those together whose tokens share a character, as bytes outside ASCII may."""
    first = span.start
    for position in range(span.start, span.stop):
        ids = span.segment.ids[first - span.start : position + 1 - span.start]
        if position + 1 == span.stop or not tokenizer.decode(ids).endswith(REPLACEMENT):
            yield range(first, position + 1)
            first = position + 1
