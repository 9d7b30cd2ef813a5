"""Draw a fused prefill as an HTML page: the prompt's text, coloured by how each token was computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from jinja2 import Environment
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.prompts.segments import Prompt, Span

REPLACEMENT = "\ufffd"

PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>What was recomputed</title><style>
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
</style>
<p>{{ summary }}</p>
<div class="timeline">
{% for stage, share in stages.items() %}
<span class="{{ stage }}" style="width:{{ '%.2f' % (100 * share) }}%">{{ stage }}</span>
{% endfor %}
</div>
<p>
{% for fate in ("reused", "recomputed", "computed") %}
<span class="{{ fate }}">{{ fate }}</span>
{% endfor %}
</p>
{% for section in sections %}
<section class="{{ 'missing' if section.reason else section.role }}"><small>
{{- section.role }}, {{ section.tokens }} tokens
{%- if section.reason %}
: {{ section.reason }}
{%- endif %}
{% if section.probed is not none %}
, probed <span class="heat" style="width:{{ '%.2f' % (12 * section.probed) }}rem"></span>
{{- '%.0f' % (100 * section.probed) }}%
{%- endif %}
</small>
{% for fate, text in section.pieces %}<span class="{{ fate }}">{{ text }}</span>{% endfor %}
</section>
{% endfor %}
</html>
"""
"""A Jinja template. Sections are not indented, because a browser shows their whitespace."""


def explain_html(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, report: FusionReport, scores: Tensor | None = None
) -> str:
    """Draw which tokens were reused, which were recomputed although stored, and which had no cache.

    Args:
        tokenizer: of the model.
        prompt: the prompt.
        report: of its prefill.
        scores: `[T]`, the probe's score of each token, to show each passage's share; None shows no shares.

    Returns:
        One HTML page without scripts and external references. The page contains the question.
    """
    timings = report.timings
    summary = (
        f"{report.method}, ratio {report.ratio:g}: {report.reused_tokens:,} tokens reused, {len(report.selected):,} "
        f"recomputed, {report.rows - len(report.selected):,} computed; first token after {timings.ttft_s:.2f} s "
        f"(load {timings.load_s:.2f}, probe {timings.probe_s:.2f}, recompute {timings.recompute_s:.2f})"
    )
    hits = {lookup.start for lookup in report.lookups if lookup.hit}
    reasons = {lookup.start: lookup.reason for lookup in report.lookups if not lookup.hit}
    probed = {} if scores is None else _probed_shares(prompt, hits, scores)
    sections = [
        {
            "role": span.segment.role,
            "tokens": len(span),
            "reason": reasons.get(span.start),
            "probed": probed.get(span.start),
            "pieces": _pieces(tokenizer, span, set(report.selected), stored=span.start in hits),
        }
        for span in prompt.spans
    ]
    environment = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    stages = {stage: seconds / max(timings.ttft_s, 1e-9) for stage, seconds in timings.stages.items()}
    return environment.from_string(PAGE).render(summary=summary, stages=stages, sections=sections)


def _probed_shares(prompt: Prompt, hits: set[int], scores: Tensor) -> dict[int, float]:
    """Return each reused passage's share of the probe's scores, by the passage's position."""
    sums = {span.start: float(scores[span.start : span.stop].sum()) for span in prompt.chunks if span.start in hits}
    total = sum(sums.values())
    return {start: score / total for start, score in sums.items()} if total > 0 else {}


def _pieces(
    tokenizer: PreTrainedTokenizerBase, span: Span, selected: set[int], *, stored: bool
) -> Iterator[tuple[str, str]]:
    """Yield `(fate, text)` of a span's longest runs of tokens with the same fate."""

    def fate(positions: range) -> str:
        if not stored:
            return "computed"
        return "recomputed" if any(position in selected for position in positions) else "reused"

    for name, ranges in groupby(_character_ranges(tokenizer, span), key=fate):
        ids = [span.segment.ids[position - span.start] for positions in ranges for position in positions]
        yield name, tokenizer.decode(ids)


def _character_ranges(tokenizer: PreTrainedTokenizerBase, span: Span) -> Iterator[range]:
    """Yield a span's positions in ranges whose tokens are whole characters; bytes outside ASCII may share one."""
    first = span.start
    for position in range(span.start, span.stop):
        ids = span.segment.ids[first - span.start : position + 1 - span.start]
        if position + 1 == span.stop or not tokenizer.decode(ids).endswith(REPLACEMENT):
            yield range(first, position + 1)
            first = position + 1
