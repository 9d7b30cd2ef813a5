"""The picture of a prefill shows every token once, in the colour of its fate."""

from __future__ import annotations

import re
from html import unescape

from qcfuse_rag import BLIND, FusionEngine, make_method
from qcfuse_rag.report.explain import explain_html
from tests.conftest import PASSAGES


def test_every_token_is_shown_with_its_fate(engine: FusionEngine) -> None:
    engine.warm(PASSAGES[:2], bases=(BLIND,))
    prompt = engine.prompt("Is 1 < 2 & why?", PASSAGES)
    report = engine.prefill(prompt, method=make_method("qcfuse", ratio=0.3)).report
    page = explain_html(engine.lm.tokenizer, prompt, report)
    body = page[page.index("<section") :]
    shown = re.findall(r'<span class="(\w+)">(.*?)</span>', body, re.DOTALL)
    assert unescape("".join(text for _, text in shown)) == engine.lm.tokenizer.decode(prompt.ids)
    recomputed = unescape("".join(text for fate, text in shown if fate == "recomputed"))
    decode = engine.lm.tokenizer.decode
    assert len(recomputed) == sum(len(decode([prompt.ids[position]])) for position in report.selected)
    assert body.count('class="missing"') == 1
    assert "absent" in body
    assert "1 &lt; 2 &amp; why?" in body
    assert "script" not in page
    assert "http" not in page
