"""The demonstration as one HTML page: its table, a picture of the seconds, and every answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment

from qcfuse_rag.cli.demo.pair import AnsweredPair

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Full prefill and qcfuse, side by side</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b;
       background: #fff }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { border-bottom: 1px solid #bbb; padding: .4rem .6rem; text-align: left; vertical-align: top }
.full { fill: #8a5a00 } .fused { fill: #00598a } .right { color: #00652e } .wrong { color: #a80000 }
small { color: #555 }
</style>
<h1>Full prefill and qcfuse, side by side</h1>
<p>{{ about }}. Each answer was computed alone.</p>
<table>
<tr><th></th><th>full prefill</th><th>qcfuse</th></tr>
{% if totals.full.right is not none %}
<tr><td>right answers</td>
{% for side in (totals.full, totals.fused) %}<td>{{ side.right }} of {{ totals.questions }}</td>{% endfor %}</tr>
{% endif %}
<tr><td>the same answer</td><td></td><td>{{ totals.same }} of {{ totals.questions }}</td></tr>
{% for label, name in (("time to first token, median", "ttft_s"), ("whole answer, median", "total_s")) %}
<tr><td>{{ label }}</td><td>{{ "%.2f"|format(totals.full[name]) }} s</td>
<td>{{ "%.2f"|format(totals.fused[name]) }} s</td></tr>
{% endfor %}
<tr><td>prompt tokens computed, median</td><td>{{ "{:,.0f}".format(totals.full.rows) }}</td>
<td>{{ "{:,.0f}".format(totals.fused.rows) }}</td></tr>
</table>
<h2>Seconds to the first token</h2>
<svg viewBox="0 0 800 {{ 34 * pairs|length + 10 }}" width="100%" role="img" aria-label="seconds to the first token">
{% for pair in pairs %}{% set top = 34 * loop.index0 %}
<text x="0" y="{{ top + 20 }}" font-size="14">{{ loop.index }}</text>
{% for name, answer in (("full", pair.full), ("fused", pair.fused)) %}
<rect class="{{ name }}" x="30" y="{{ top + 4 + 14 * loop.index0 }}"
 height="12" width="{{ 660 * answer.ttft_s / longest }}"/>
<text x="{{ 36 + 660 * answer.ttft_s / longest }}" y="{{ top + 15 + 14 * loop.index0 }}"
 font-size="12">{{ "%.2f"|format(answer.ttft_s) }} s</text>
{% endfor %}{% endfor %}
</svg>
<p><small>Upper bar: full prefill. Lower bar: qcfuse.</small></p>
<h2>Answers</h2>
<table>
<tr><th></th><th>question</th><th>full prefill</th><th>qcfuse</th></tr>
{% for pair in pairs %}
<tr><td>{{ loop.index }}</td>
<td>{{ pair.question.question }}{% if pair.question.answers %}<br><small>truth: {{ pair.question.answers[0] }}</small>
{% endif %}</td>
{% for answer in (pair.full, pair.fused) %}
<td>{{ answer.text() }}<br><small>{{ "%.2f"|format(answer.total_s) }} s{% if answer.right is not none %},
<b class="{{ 'right' if answer.right else 'wrong' }}">{{ "right" if answer.right else "wrong" }}</b>{% endif %}</small>
</td>{% endfor %}</tr>
{% endfor %}
</table>
</html>
"""


def demo_page(pairs: Sequence[AnsweredPair], totals: dict[str, Any], about: str) -> str:
    """Return the page; it needs nothing from elsewhere."""
    longest = max(answer.ttft_s or 0.0 for pair in pairs for answer in (pair.full, pair.fused)) or 1.0
    template = Environment(autoescape=True).from_string(PAGE)
    return template.render(pairs=list(pairs), totals=totals, about=about, longest=longest)
