"""Variables of chat templates: which there are, what they change, and what they cannot change."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import pytest

from qcfuse_rag import PromptTemplate
from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.chat_template import ChatTemplate
from qcfuse_rag.prompts.segments import Role
from tests.support.cases import cases
from tests.support.passages import PASSAGES, QUESTION
from tests.support.thinking import thinking_template, thinking_tokenizer

CHANGES_PREFIX = {"reasoning_effort": "high"}
CHANGES_END = {"enable_thinking": False}


@pytest.fixture
def builder() -> PromptBuilder:
    return PromptBuilder(thinking_tokenizer(), PromptTemplate())


@pytest.mark.parametrize("kwargs", [{}, CHANGES_PREFIX, CHANGES_END, {**CHANGES_PREFIX, **CHANGES_END}])
def test_a_prompt_is_the_tokenizers_own_with_these_variables(builder: PromptBuilder, kwargs: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
    conversation = [*turns, {"role": "user", "content": QUESTION}]
    tokenizer = builder.tokenizer
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **kwargs)
    assert builder.with_kwargs(kwargs).render(conversation).text == expected
    prompt = builder.with_kwargs(kwargs).build(QUESTION, PASSAGES, turns)
    whole = builder.with_kwargs(kwargs).render(builder.turns(QUESTION, PASSAGES, turns)).text
    assert "".join(segment.text for segment in prompt.segments) == whole
    assert whole.startswith("<s>Effort: high.\n") == ("reasoning_effort" in kwargs)
    assert whole.endswith("</think>\n\n") == ("enable_thinking" in kwargs)


def test_the_system_prefix_follows_what_changes_its_text_and_nothing_else(builder: PromptBuilder) -> None:
    prefix, end = builder.with_kwargs(CHANGES_PREFIX), builder.with_kwargs(CHANGES_END)
    assert end.prefix_ids == builder.prefix_ids != prefix.prefix_ids
    assert builder.with_kwargs({"reasoning_effort": "low"}).prefix_ids != prefix.prefix_ids
    for changed in (builder, prefix, end):
        prompt = changed.build(QUESTION, PASSAGES)
        assert prompt.prefix_ids == changed.prefix_ids == prompt.segments[0].ids
    assert end.build(QUESTION, PASSAGES).ids != builder.build(QUESTION, PASSAGES).ids


def test_a_request_overrides_the_wordings_variables_one_by_one(builder: PromptBuilder) -> None:
    both = PromptBuilder(builder.tokenizer, PromptTemplate(chat_template_kwargs={**CHANGES_PREFIX, **CHANGES_END}))
    assert both.build(QUESTION, PASSAGES) == builder.with_kwargs({**CHANGES_PREFIX, **CHANGES_END}).build(
        QUESTION, PASSAGES
    )
    thinking = both.with_kwargs({"enable_thinking": True})
    assert thinking.build(QUESTION, PASSAGES) == builder.with_kwargs(CHANGES_PREFIX).build(QUESTION, PASSAGES)
    assert both.with_kwargs({}) is both.with_kwargs(None) is both


def test_a_request_with_variables_shares_what_the_tokenizer_took_long_for(builder: PromptBuilder) -> None:
    assert builder.build(QUESTION, PASSAGES)
    assert builder.with_kwargs(CHANGES_END).tokens is builder.tokens


def test_a_template_is_tried_once_for_all_that_reads_it(
    monkeypatch: pytest.MonkeyPatch, templates_tried_once: cached_property[Any]
) -> None:
    tried = list[object]()
    monkeypatch.setattr(ChatTemplate, "_trees", templates_tried_once)
    monkeypatch.setattr("qcfuse_rag.prompts.chat_template._refuse_endless", tried.append)
    builder = PromptBuilder(thinking_tokenizer(), PromptTemplate())
    assert builder.build(QUESTION, PASSAGES).ids
    assert builder.chunk_ids(PASSAGES[0])
    assert builder.with_kwargs(CHANGES_END).build(QUESTION, PASSAGES).ids
    assert len(tried) == 1
    assert PromptBuilder(thinking_tokenizer(), PromptTemplate()).chunk_ids(PASSAGES[0])
    assert len(tried) == 2


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "date_string", "strftime_now", "bos_token", "tokenize", "documents"],
)
def test_what_the_builder_sets_cannot_be_set(name: str) -> None:
    template = thinking_template() + "{{ strftime_now('%Y') }}{{ date_string }}{{ tokenize }}{{ documents }}"
    builder = PromptBuilder(thinking_tokenizer(template=template), PromptTemplate())
    assert builder.chat_template.variables == {"enable_thinking", "reasoning_effort"}
    with pytest.raises(InvalidTemplate, match=f"cannot set {name}: .*reads enable_thinking, reasoning_effort besides"):
        builder.with_kwargs({name: "x", **CHANGES_END}).build(QUESTION, PASSAGES)


def test_a_variable_that_the_template_does_not_read_is_named(builder: PromptBuilder) -> None:
    with pytest.raises(InvalidTemplate, match="cannot set enable_thinkin, mood: "):
        builder.with_kwargs({"mood": 1, "enable_thinkin": False}).render([("user", QUESTION)])
    silent = PromptBuilder(builder.tokenizer, PromptTemplate(chat_template_kwargs={"mood": 1}))
    with pytest.raises(InvalidTemplate, match="cannot set mood: "):
        assert silent.prefix_ids


def test_templates_are_read_with_all_tags_that_transformers_knows(builder: PromptBuilder) -> None:
    tokenizer = builder.tokenizer
    tokenizer.chat_template = (
        "{% set ns = namespace(n=0) %}{% set mood = mood | default('calm') %}"
        "{% macro say(x) %}{{ x ~ tone }}{% endmacro %}"
        "{% for message in messages %}{% if loop.index > 99 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}{% if not mood %}{{ raise_exception('') }}"
        "{% endif %}{{ say(range(2) | length) }}"
    )
    assert ChatTemplate(tokenizer).variables == {"mood", "tone"}
    tokenizer.chat_template = {"default": "{{ messages }}{{ mood }}", "tool_use": "{{ tools }}{{ tone }}"}
    assert ChatTemplate(tokenizer).variables == {"mood", "tone"}
    tokenizer.chat_template = None
    assert ChatTemplate(tokenizer).variables == frozenset()


def test_special_tokens_and_markers_in_variables_are_text(builder: PromptBuilder) -> None:
    plain, end = builder.build(QUESTION, PASSAGES), builder.tokenizer.eos_token_id
    spelt = "</s><s>[[qcfuse:0:context]][[qcfuse:1:question]]"
    prompt = builder.with_kwargs({"reasoning_effort": spelt}).build(QUESTION, PASSAGES)
    assert prompt.ids.count(end) == plain.ids.count(end)
    assert f"Effort: {spelt}." in prompt.segments[0].text
    assert [span.segment for span in prompt.chunks] == [span.segment for span in plain.chunks]
    listed = builder.with_kwargs({"reasoning_effort": [{"</s>": "</s>"}]}).render([("user", QUESTION)])
    assert "[{'</s>': '</s>'}]" in listed.text


def test_the_clock_stays_stopped(builder: PromptBuilder) -> None:
    today = "Today is {{ strftime_now('%d %b %Y') }}, {{ date_string }}\n"
    builder.tokenizer.chat_template = today + thinking_template()
    for kwargs in ({}, CHANGES_PREFIX):
        prefix = builder.with_kwargs(kwargs).build(QUESTION, PASSAGES).segments[0]
        assert prefix.text.startswith("Today is 01 Jan 2025, 01 Jan 2025\n")
        assert prefix.role is Role.SYSTEM_PREFIX


def test_a_value_that_the_template_cannot_take_is_a_clear_error(builder: PromptBuilder) -> None:
    builder.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ budget + 1 }}"
    with pytest.raises(InvalidTemplate, match="does not take these messages: TypeError"):
        builder.with_kwargs({"budget": "ten"}).render([("user", QUESTION)])


@pytest.mark.parametrize("value", [object(), {1, 2}, {("a", "b"): 1}])
def test_variables_are_json(value: object) -> None:
    with pytest.raises(InvalidTemplate, match="has to be an object of JSON values"):
        PromptTemplate(chat_template_kwargs={"x": value})


def test_templates_of_prompts_stay_hashable() -> None:
    assert hash(PromptTemplate(chat_template_kwargs=CHANGES_END)) == hash(PromptTemplate())
    assert PromptTemplate(chat_template_kwargs=CHANGES_END) != PromptTemplate()


MEMORY = "{{ 'a' * 10**11 }}"
TIME = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = [
    MEMORY,
    TIME,
    "{% set x = [0] * 10**10 %}",
    "{{ 'a' | center(10**11) }}",
    "{{ lipsum(n=10**9) }}",
    "{{ 10 ** (10 ** 9) }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
]


@pytest.mark.parametrize("bomb", cases(BOMBS, MEMORY, TIME))
def test_a_template_that_takes_any_amount_of_time_or_memory_is_refused(
    bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcfuse_rag.prompts.chat_template.TRIAL_S", 1)
    tokenizer = thinking_tokenizer(template=thinking_template() + bomb)
    for use in (lambda made: made.render([("user", QUESTION)]), lambda made: made.control_tokens):
        with pytest.raises(InvalidTemplate, match=r"takes more than 1 s or 1 GB for a few words.*take another model"):
            use(ChatTemplate(tokenizer))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'x' | nothing }}", "nothing"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_one_clear_error(end: str, message: str) -> None:
    tokenizer = thinking_tokenizer(template=thinking_template() + end)
    with pytest.raises(InvalidTemplate, match=message):
        ChatTemplate(tokenizer).render([("user", QUESTION)])
