"""Reasoning apart from answers: read from any pieces, by the marks of the model's templates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from qcfuse_rag import FusionEngine, Generation, MemoryStore, SamplingParams
from qcfuse_rag.generation.response_format import Delta, ReasoningFormat, ResponseFormat, ResponseReader, ResponseSyntax
from qcfuse_rag.generation.tool_parsers import ParsedResponse, ToolCall
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.thinking import grammar_of, thinking_model, thinking_template, thinking_tokenizer
from tests.support.tool_templates import LOOK_UP, MOOR

HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
HARMONY_TEMPLATE = (
    "{% for m in messages %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
)
OWN_FORMAT = {
    "start_anchor": "<assistant>\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<|muse|>", "close_pattern": r"<\|/muse(\|)>\s*"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
        "content": {"close": "</s>"},
    },
}


def prompt_ending(text: str) -> Prompt:
    return Prompt((Segment(Role.TEXT, (5,), text),))


def read(
    tokenizer: PreTrainedTokenizerBase,
    pieces: Iterable[str],
    *,
    end: str = "<assistant>\n",
    form: ResponseFormat | None = None,
) -> tuple[Delta, ParsedResponse]:
    """Return all pieces that a reader gave, joined, and the parsed answer; it must be the same in one piece."""
    form, pieces = form or ResponseFormat(), list(pieces)
    reader = ResponseReader(tokenizer, form, prompt_ending(end))
    shown = [reader.push(piece) for piece in pieces]
    generation = Generation("".join(pieces), (), "length", None, 0.0)  # type: ignore[arg-type]
    rest, response = reader.finish(generation)
    assert reader.finish(generation)[1] == response
    whole = ResponseReader(tokenizer, form, prompt_ending(end)).finish(generation)
    assert whole == (Delta(response.content, response.reasoning), response)
    return Delta(*map("".join, zip(*shown, rest, strict=True))), response


TAGGED = thinking_tokenizer()


@given(
    reasoning=st.text("<think/>a \n", max_size=20).filter(lambda text: "</think>" not in text),
    text=st.text("<think/>b \n", max_size=20),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_tags_never_leak_however_the_answer_is_cut(reasoning: str, text: str, cuts: list[int]) -> None:
    answer = f"\n<think>\n{reasoning}\n</think>\n\n{text}"
    edges = sorted({0, *(min(cut, len(answer)) for cut in cuts), len(answer)})
    shown, response = read(TAGGED, [answer[a:b] for a, b in itertools.pairwise(edges)])
    assert shown == (text.lstrip(), reasoning.strip())
    assert (response.content, response.reasoning) == shown


@pytest.mark.parametrize(
    ("answer", "text", "reasoning"),
    [
        ("Plain.", "Plain.", ""),
        (" 1 <think>2</think>", " 1 <think>2</think>", ""),
        ("<thin air", "<thin air", ""),
        ("<think>\n\n</think>\n\nYes.", "Yes.", ""),
        ("<think>It goes on", "", "It goes on"),
        ("<think>a</think>b<think>c</think>", "b<think>c</think>", "a"),
        ("", "", ""),
    ],
)
def test_reasoning_stands_in_tags_at_the_start(answer: str, text: str, reasoning: str) -> None:
    assert read(TAGGED, answer)[0] == (text, reasoning)


def test_a_prompt_may_open_the_reasoning() -> None:
    tokenizer = thinking_tokenizer(template=thinking_template(begun=True))
    assert read(tokenizer, "\nHm.\n</think>\n\nYes.", end="<assistant>\n<think>\n")[0] == ("Yes.", "Hm.")
    assert read(tokenizer, "<think>Hm.</think>Yes.", end="<assistant>\n")[0] == ("Yes.", "Hm.")
    assert read(tokenizer, "Yes.", end="<assistant>\n<think>\n\n</think>\n\n")[0] == ("Yes.", "")
    assert read(tokenizer, "No.</think>", end="I say <think> aloud.")[0] == ("No.</think>", "")


def test_without_marks_in_its_templates_a_model_has_no_reasoning(tokenizer: PreTrainedTokenizerBase) -> None:
    assert ReasoningFormat.of(tokenizer) is None
    assert read(tokenizer, "<think>a</think>b")[0] == ("<think>a</think>b", "")


def test_pieces_of_the_text_come_at_once() -> None:
    reader = ResponseReader(TAGGED, ResponseFormat(), prompt_ending("<assistant>\n"))
    pushed = [reader.push(piece) for piece in ("<think>", "One", " two", " </thi", "nk>", "\n\n", "Yes", " <", "b")]
    assert pushed == [("", ""), ("", "One"), ("", " two"), *[("", "")] * 3, ("Yes", ""), (" <", ""), ("b", "")]


def test_calls_are_read_behind_the_reasoning() -> None:
    form = ResponseFormat([LOOK_UP, MOOR])
    call = '<tool_call>\n{"name": "moor", "arguments": {}}\n</tool_call>'
    shown, response = read(TAGGED, f"<think>\nI could <tool_call>.\n</think>\n\nSo: {call}", form=form)
    assert shown == ("So: ", "I could <tool_call>.") or shown == ("So:", "I could <tool_call>.")
    assert response == ParsedResponse("So:", (ToolCall("moor", {}),), reasoning="I could <tool_call>.")


def test_a_grammar_leaves_no_place_for_reasoning() -> None:
    tokenizer = thinking_tokenizer(template=thinking_template(begun=True))
    form = ResponseFormat(response_format={"type": "json_object"})
    assert read(tokenizer, '{"a": 1}', end="<assistant>\n<think>\n", form=form)[0] == ('{"a": 1}', "")


class TestSpecialTokens:
    def test_only_answers_with_marks_among_the_special_tokens_keep_them(self) -> None:
        magistral = thinking_tokenizer("[THINK]", "[/THINK]", template=thinking_template("[THINK]", "[/THINK]"))
        params = SamplingParams()
        assert ResponseFormat().sampling(params, magistral).special_tokens
        assert ResponseFormat().sampling(params, TAGGED) is params
        assert not ResponseFormat(response_format={"type": "json_object"}).sampling(params, magistral).special_tokens
        assert ResponseSyntax.of(TAGGED, ResponseFormat()).hidden is None

    def test_harmony(self) -> None:
        tokenizer = thinking_tokenizer(*HARMONY_TOKENS, template=HARMONY_TEMPLATE)
        assert ResponseFormat().sampling(SamplingParams(), tokenizer).special_tokens
        answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
        for pieces in (answer, [answer], answer.replace("|>", "|>\0").split("\0")):
            assert read(tokenizer, pieces, end="<|end|><|start|>assistant")[0] == ("Yes.", "Hm.")
        assert read(tokenizer, "<|channel|>final<|message|>Yes.<|return|>", end="<|start|>assistant")[0] == ("Yes.", "")

    def test_the_tokenizers_own_format_comes_first(self) -> None:
        tokenizer = thinking_tokenizer("<|muse|>", "<|/muse|>")
        tokenizer.response_template = OWN_FORMAT
        answer = '<|muse|>Hm.<|/muse|>\nYes.<tool_call>{"name": "moor", "arguments": {}}</tool_call></s>'
        shown, response = read(tokenizer, answer, end="</s>\n<assistant>\n", form=ResponseFormat([MOOR]))
        assert (response.content, response.reasoning) == shown == ("Yes.", "Hm.")
        assert response.calls == (ToolCall("moor", {}),)
        assert read(tokenizer, "Hm.<|/muse|>Yes.", end="<assistant>\n<|muse|>")[0] == ("Yes.", "Hm.")

    @pytest.mark.parametrize("broken", [{"fields": 5}, {"fields": {"thinking": {"open": 7}}}, {"fields": {}}, "x"])
    def test_a_broken_format_is_passed_over(self, broken: Any) -> None:
        tokenizer = thinking_tokenizer()
        tokenizer.response_template = broken
        assert read(tokenizer, "<think>Hm.</think>Yes.")[0] == ("Yes.", "Hm.")

    def test_special_tokens_that_are_no_marks_are_not_shown(self) -> None:
        magistral = thinking_tokenizer("[THINK]", "[/THINK]", template=thinking_template("[THINK]", "[/THINK]"))
        assert read(magistral, ["[THINK]", "a", "<s>", "[/THINK]", "b", "<pad>", "c"])[0] == ("bc", "a")


@pytest.mark.parametrize("more", ["", "\nQuestion: no", "\n\nQuestion: why?\nAnswer: no"])
@pytest.mark.parametrize(("special", "fidelity"), [(True, "fast"), (False, "fast"), (True, "exact")])
def test_a_models_own_answer_is_read(special: bool, fidelity: Any, more: str) -> None:
    tags = ("[THINK]", "[/THINK]")
    lm = thinking_model(*(tags if special else ()), template=thinking_template(*tags))
    engine = make_engine(lm, MemoryStore())
    form, parts = ResponseFormat(), ("[THINK]", "\nHm, é.\nQuestion:\n", "[/THINK]", "\n\nYes." + more)
    params = SamplingParams(max_new_tokens=60, grammar=grammar_of(lm.tokenizer, parts), fidelity=fidelity)
    prompt = engine.prompt(QUESTION, PASSAGES)
    stream = engine.stream(prompt, form.sampling(params, lm.tokenizer))
    reader = ResponseReader(lm.tokenizer, form, prompt)
    shown = [reader.push(piece) for piece in stream]
    rest, response = reader.finish(stream.result())
    assert ("".join(map("".join, zip(*shown, rest, strict=True)))) == "Yes.Hm, é.\nQuestion:"
    assert (response.content, response.reasoning) == ("Yes.", "Hm, é.\nQuestion:")
    assert stream.result().finish_reason == ("stop" if "\nQuestion:" in more else "end")


def test_without_its_marks_an_answer_is_as_before(engine: FusionEngine) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES)
    generation = engine.generate(prompt, SamplingParams(max_new_tokens=12))
    spelt = engine.generate(prompt, SamplingParams(max_new_tokens=12, special_tokens=True))
    assert spelt.ids == generation.ids
    reader = ResponseReader(engine.lm.tokenizer, ResponseFormat(), prompt)
    assert reader.finish(generation)[1] == ParsedResponse(generation.text)
