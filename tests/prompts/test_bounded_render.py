"""A chat template that does not end is one clear error, and computes no further."""

from __future__ import annotations

import threading

import pytest
from transformers import PreTrainedTokenizerFast

from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.prompts import bounded_render
from qcfuse_rag.prompts.bounded_render import render_bounded
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.template import PromptTemplate

ENDLESS = {
    "loops in a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "loops with a filter": "{% for a in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_an_error_and_stops(
    tokenizer: PreTrainedTokenizerFast, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_render, "RENDER_S", 0.2)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    builder = PromptBuilder(tokenizer, PromptTemplate())
    for render in (lambda: builder.prefix_ids, lambda: builder.render([("user", "Hello.")])):
        with pytest.raises(InvalidTemplate, match=r"did not end in 0.2 s"):
            render()
    for thread in threading.enumerate():
        if thread.name == "qcfuse-render":
            thread.join(20)
            assert not thread.is_alive()


def test_what_is_raised_while_rendering_is_raised_here() -> None:
    def fail() -> str:
        raise KeyError("role")

    with pytest.raises(KeyError, match="role"):
        render_bounded(fail)
    assert render_bounded(lambda: "text") == "text"
