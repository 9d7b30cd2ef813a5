"""Chat templates of models that think before they answer, and a way to make a tiny model give a set answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qcfuse_rag import LanguageModel, SamplingParams
from qcfuse_rag.generation.response_format import ResponseFormat
from tests.support.families import VOCABULARY, build_model, build_tokenizer
from tests.support.passages import PASSAGES, QUESTION

TURNS = (
    "{{ bos_token }}"
    "{%- if reasoning_effort is defined %}{{ 'Effort: ' ~ reasoning_effort ~ '.\n' }}{% endif %}"
    "{%- if tools %}{{ 'Write a call as <tool_call>{...}</tool_call>.\n' ~ tools | tojson ~ '\n' }}{% endif %}"
    "{%- for message in messages %}{{ '<' ~ message.role ~ '>\n' }}"
    "{%- if message.reasoning_content %}{{ OPENING ~ '\n' ~ message.reasoning_content ~ '\n' ~ CLOSING ~ '\n\n' }}"
    "{%- endif %}{{ message.content ~ '</s>\n' }}{% endfor %}{{ '<assistant>\n' }}"
)
WITHOUT_THINKING = (
    "{%- if enable_thinking is defined and not enable_thinking %}{{ OPENING ~ '\n\n' ~ CLOSING ~ '\n\n' }}{% endif %}"
)


def thinking_template(opening: str = "<think>", closing: str = "</think>", *, begun: bool = False) -> str:
    """Return a template that reads `enable_thinking` and `reasoning_effort`.

    Args:
        opening: tag before reasoning.
        closing: tag after reasoning.
        begun: whether the prompt ends with the opening tag.
    """
    template = TURNS + ("{{ OPENING ~ '\n' }}" if begun else WITHOUT_THINKING)
    return template.replace("OPENING", repr(opening)).replace("CLOSING", repr(closing))


def thinking_tokenizer(*special: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with such a template and with further special tokens."""
    tokenizer = build_tokenizer(lambda: [*PASSAGES, QUESTION])
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = template or thinking_template()
    return tokenizer


def thinking_model(*special: str, template: str | None = None) -> LanguageModel:
    """Return a tiny model with such a tokenizer."""
    model = build_model("llama", max_position_embeddings=4096, vocab_size=VOCABULARY + len(special))
    return LanguageModel.wrap(model, thinking_tokenizer(*special, template=template))


def answer_with(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """Make every model write this answer and end it: a grammar leaves no choice. Special tokens are parts of their own.

    The answers of requests with a grammar of their own stay theirs.
    """
    answer_by(monkeypatch, lambda form: None if form.has_grammar else parts)


def answer_in_turn(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """Make the models write these answers, like `answer_with`, one for each request without a grammar."""
    rest = iter(answers)
    answer_by(monkeypatch, lambda form: None if form.has_grammar else [next(rest)])


def answer_by(monkeypatch: pytest.MonkeyPatch, choose: Callable[[ResponseFormat], Sequence[str] | None]) -> None:
    """Make the models write the parts of an answer that is chosen by the response format; None: their own."""
    sampling = ResponseFormat.sampling

    def forced(self: ResponseFormat, params: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
        params, parts = sampling(self, params, tokenizer), choose(self)
        return params if parts is None else replace(params, grammar=grammar_of(tokenizer, parts))

    monkeypatch.setattr(ResponseFormat, "sampling", forced)


def grammar_of(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]) -> str:
    """Return a grammar that allows one text."""
    added: dict[str, Any] = tokenizer.get_added_vocab()
    return "start: " + " ".join(f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts)
