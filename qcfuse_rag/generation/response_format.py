"""The response format of a chat request: tool calls, JSON by a schema, or free text, behind a model's reasoning.

The tags of reasoning come from the tokenizer's response template. Without one, known tags are looked for in its chat
template. https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import PydanticUserError, TypeAdapter
from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import InvalidSetting
from qcfuse_rag.generation.completion import partial_match_length
from qcfuse_rag.generation.decoding import Generation
from qcfuse_rag.generation.sampling import json_grammar
from qcfuse_rag.generation.sampling_params import SamplingParams
from qcfuse_rag.generation.tool_parsers import BrokenCall, ParsedResponse, ToolCallParser, tool_call_parser
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.template import Tool

# Names of the field for reasoning in response templates, and keys of a field's tags.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
TAG_KEYS = ("open", "open_pattern", "close", "close_pattern")

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tags of reasoning at the start of an answer: of Qwen3, DeepSeek-R1, SmolLM3 and more; of Magistral; of Seed-OSS."""

HARMONY: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
    },
}
"""The channels of gpt-oss. https://developers.openai.com/cookbook/articles/openai-harmony"""


class Delta(NamedTuple):
    """A piece of an answer: of its text, of its reasoning, or of both; reasoning is never part of the text."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of one model's reasoning, as a response template of transformers, which may find the opening tag itself.

    Otherwise `opening` is that tag, which a prompt may end with.
    """

    response_template: Mapping[str, Any]
    opening: str | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ReasoningFormat | None:
        """Return the format of a tokenizer's model; None if neither of its templates has one."""
        if (own := _own_template(tokenizer)) is not None:
            return cls(own)
        chat_template = str(tokenizer.chat_template)
        if HARMONY["fields"]["reasoning_content"]["open"] in chat_template:
            return cls(HARMONY)
        for opening, closing in TAGS:
            if opening in chat_template and closing in chat_template:
                fields = {
                    "reasoning_content": {"open_pattern": rf"\A\s*{re.escape(opening)}", "close": closing},
                    "content": {},
                }
                return cls({"start_anchor_pattern": r"\A", "fields": fields}, opening)
        return None

    def has_tag_in(self, tokens: Iterable[str]) -> bool:
        """Return whether some of these tokens are in the tags."""
        tags = str(self.response_template).replace("\\", "")
        return any(token in tags for token in tokens)

    def in_answer(self, tokenizer: PreTrainedTokenizerBase, prompt_end: str, text: str) -> bool:
        """Return whether a text that follows a prompt ends behind the reasoning; special tags may not be shown."""
        shown = self.reader(tokenizer, prompt_end).push(text)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        return bool(shown.text and (shown.reasoning or not self.has_tag_in(special)))

    def reader(self, tokenizer: PreTrainedTokenizerBase, prompt_end: str) -> ReasoningReader:
        """Return a reader of one answer; the end of its prompt may have opened the reasoning."""
        if self.opening is not None:
            prompt_end = self.opening if prompt_end.rstrip().endswith(self.opening) else ""
        return ReasoningReader(tokenizer.get_response_parser(dict(self.response_template), prefix=prompt_end))


class ReasoningReader:
    """Separates the reasoning of one streamed answer from its text, without the tags and the whitespace beside them.

    The parser is a `ResponseParser` of transformers, which has read the end of the prompt.
    """

    def __init__(self, parser: Any) -> None:
        self._parser, self._held = parser, ""  # whitespace that may end the reasoning
        self._has_reasoning = self._has_text = self._has_begun = False

    def push(self, piece: str) -> Delta:
        """Add a piece of the answer; return what is certain, often nothing."""
        return self._piece(self._parser.feed(piece))

    def finish(self) -> Delta:
        """Return what was held back, once the answer is finished."""
        return self._piece(self._parser.finalize()[1])

    def _piece(self, events: Iterable[Mapping[str, Any]]) -> Delta:
        text, reasoning = "", self._held
        for event in events:
            if event["field"] == "content":
                text += event.get("text", "")
            else:
                reasoning += event.get("text", "")
                self._has_reasoning = True
        held = reasoning if self._has_begun else reasoning.lstrip()
        reasoning = held.rstrip()
        self._has_begun, self._held = self._has_begun or bool(reasoning), held[len(reasoning) :]
        if self._has_reasoning and not self._has_text:
            text = text.lstrip()
        self._has_text |= bool(text)
        return Delta(text, reasoning)


def _own_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return the tags of reasoning and content in a tokenizer's response template; None if it has none of reasoning.

    Tool calls stay part of the content, which `generation.tool_parsers` parse.
    """
    try:
        fields = {
            name: {key: value for key, value in field.items() if key in TAG_KEYS}
            for name, field in tokenizer.response_template["fields"].items()
            if name in (*REASONING_FIELDS, "content")
        }
        own = {**tokenizer.response_template, "fields": fields}
        tokenizer.get_response_parser(own, prefix="")
    except (ValueError, TypeError, KeyError, AttributeError):  # there is no response template, or it is none
        return None
    return own if fields.keys() - {"content"} else None


ToolChoice = str | bool | Mapping[str, Any] | None
"""Which tool to call: `auto` or None lets the model decide, `none` forbids calls, `required` or `any` demands a call; a
tool's name, or `{"type": "function", "function": {"name": ...}}`, demands a call of that tool; `{"type":
"allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}` leaves out the other tools."""

JSON_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
SCHEMA_KEYS = {"properties", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"}
"""Keys by which a JSON schema without a type is known."""


def _is_schema(value: Mapping[str, Any]) -> bool:
    kinds = value.get("type")
    if kinds is None:
        return bool(SCHEMA_KEYS & value.keys())
    return all(kind in JSON_TYPES for kind in (kinds if isinstance(kinds, list | tuple) else [kinds]))


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The allowed form of an answer, in the terms of OpenAI's chat API.

    Attributes:
        tools: all tools, as `{"type": "function", "function": {...}}`.
        tool_choice: which of the tools to call.
        response_format: `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema":
            {"schema": ...}}`; the schema may also stand in the place of `json_schema`, or alone, or be a class that
            pydantic knows; None is text. With tools, an answer is one call or such JSON.
        parallel_tool_calls: whether an answer may have several calls; else those after the first are dropped.

    Raises:
        InvalidSetting: if the choice names an unknown tool, or the format's type is unknown.
    """

    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = None
    response_format: Mapping[str, Any] | type | None = None
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        if isinstance(kind := self.response_format, type):
            try:
                schema = TypeAdapter(kind).json_schema()
            except PydanticUserError as error:
                message = f"response_format is the class {kind.__name__}, which has no JSON schema: {error.message}"
                raise InvalidSetting(message, "response_format") from error
            object.__setattr__(self, "response_format", {"type": "json_schema", "schema": schema})
        _ = self.schema  # raises if its type is not known
        match self.tool_choice:
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]},
            } | {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
                object.__setattr__(self, "tools", tuple(tool for choice in allowed for tool in self._named(choice)))
                object.__setattr__(self, "tool_choice", mode)
        if self.required_tools == () and self.tool_choice in (True, "any", "required"):
            raise InvalidSetting("tool_choice demands a call, and there are no tools to call", "tool_choice")

    @property
    def visible_tools(self) -> Sequence[Tool]:
        """The tools to show to the model."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def required_tools(self) -> Sequence[Tool]:
        """The tools of which one must be called; empty if no call is demanded."""
        if self.tool_choice in (None, False, "auto", "none"):
            return ()
        if self.tool_choice in (True, "any", "required"):
            return tuple(self.tools)
        return self._named(self.tool_choice)

    def _named(self, choice: Any) -> Sequence[Tool]:
        """Return the tool that a choice names, as a sequence of one."""
        function = choice.get("function", choice) if isinstance(choice, Mapping) else {"name": choice}
        name = function.get("name") if isinstance(function, Mapping) else None
        named = [tool for tool in self.tools if tool["function"]["name"] == name]
        if not named:
            names = ", ".join(tool["function"]["name"] for tool in self.tools) or "none"
            message = f"tool_choice names {name!r}, which is not among the given tools: {names}"
            raise InvalidSetting(message, "tool_choice")
        return named

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that the answer must follow; None if the answer is text."""
        match self.response_format or None:
            case None | {"type": "text"}:
                return None
            case {"type": "json_object" | "json_schema", "json_schema": {"schema": Mapping() as schema}}:
                return schema
            case {"type": "json_object" | "json_schema", "schema": Mapping() as schema}:
                return schema
            case {"type": "json_object", **rest} if not any(rest.values()):
                return {"type": "object"}
            case {"type": "json_schema", "json_schema": Mapping() as schema} if _is_schema(schema):
                return schema
            case Mapping() as schema if _is_schema(schema):
                return schema
        raise InvalidSetting(
            'response_format has to be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            f'"json_schema": {{"schema": ...}}}}, not {self.response_format!r}',
            "response_format",
        )

    @property
    def has_grammar(self) -> bool:
        """Whether the whole answer follows a grammar: JSON by a schema, or a demanded call."""
        return self.schema is not None or bool(self.required_tools)

    def with_schema_hint(self, question: str) -> str:
        """Add the schema that the answer must follow to a question, if there is one with properties."""
        if self.schema is None or "properties" not in self.schema:
            return question
        return f"{question}\n\nAnswer with JSON that follows this schema: {json.dumps(self.schema)}"

    def sampling(self, params: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
        """Return sampling settings with the grammar of this format, for text that `ResponseReader` reads.

        Raises:
            UnsupportedModel: if there are tools and the model's syntax of tool calls is unknown.
        """
        syntax = ResponseSyntax.of(tokenizer, self)  # refuses unreadable calls early
        if syntax.hidden is not None:
            params = replace(params, special_tokens=True)
        if not self.has_grammar:
            return params
        if syntax.tool_calls is None:
            return replace(params, grammar=json_grammar(self.schema or {}))
        schema = None if self.required_tools else self.schema
        tools = self.required_tools or self.visible_tools
        return replace(params, grammar=syntax.tool_calls.grammar(tokenizer, tools, schema))


@dataclass(frozen=True, slots=True)
class ResponseSyntax:
    """How a model delimits the parts of an answer: tool calls and reasoning, if it can have any.

    `hidden` are special tokens to remove from the answer; None if the answer is decoded without special tokens.
    """

    tool_calls: ToolCallParser | None
    reasoning: ReasoningFormat | None
    hidden: tuple[str, ...] | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, response_format: ResponseFormat) -> ResponseSyntax:
        """Return the syntax of a model's answers; raise `UnsupportedModel` if that of tool calls is not known."""
        tools = response_format.visible_tools
        parser = tool_call_parser(tokenizer, tools) if tools else None
        # A grammar leaves no place for reasoning.
        reasoning = None if response_format.has_grammar else ReasoningFormat.of(tokenizer)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        tags = () if parser is None else (parser.start_tag, parser.end_tag)
        if not set(tags) & set(special) and (reasoning is None or not reasoning.has_tag_in(special)):
            return cls(parser, reasoning)
        return cls(parser, reasoning, tuple(token for token in special if token not in tags))


class ResponseReader:
    """Separates the text of one streamed answer from its reasoning, which the prompt may open, and its tool calls.

    Raises:
        UnsupportedModel: if there are tools and the model's syntax of tool calls is unknown.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, response_format: ResponseFormat, prompt: Prompt | None = None
    ) -> None:
        syntax = ResponseSyntax.of(tokenizer, response_format)
        self._parser, self._tools = syntax.tool_calls, response_format.visible_tools
        self._last_call = None if response_format.parallel_tool_calls else 1
        self._requires_call = bool(response_format.required_tools)
        prompt_end = "" if prompt is None else prompt.segments[-1].text
        self._reasoning_reader = None if syntax.reasoning is None else syntax.reasoning.reader(tokenizer, prompt_end)
        self._hidden = re.compile("|".join(map(re.escape, syntax.hidden or ())) or "(?!)")
        self._pushed = self._shown = 0
        self._finished = False
        self._text = self._reasoning = ""

    def push(self, piece: str) -> Delta:
        """Add a piece of the answer; return what is certainly text or reasoning and no call, often nothing."""
        self._pushed += len(piece)
        return self._add(Delta(piece) if self._reasoning_reader is None else self._reasoning_reader.push(piece))

    def finish(self, generation: Generation) -> tuple[Delta, ParsedResponse]:
        """Parse the finished answer; return what was not shown yet, and the parsed answer."""
        shown, shown_reasoning = self._shown, len(self._reasoning)
        if not self._finished:
            self.push(generation.text[self._pushed :])
            if self._reasoning_reader is not None:
                self._add(self._reasoning_reader.finish())
            self._finished = True
        response = ParsedResponse(self._text) if self._parser is None else self._parser.parse(self._text, self._tools)
        if not response.calls and not response.broken:
            incomplete = BrokenCall(self._text, "the call is incomplete")
            response = ParsedResponse("", broken=(incomplete,)) if self._requires_call else ParsedResponse(self._text)
        rest = Delta(response.content[shown:], self._reasoning[shown_reasoning:])
        return rest, replace(response, calls=response.calls[: self._last_call], reasoning=self._reasoning)

    def _add(self, piece: Delta) -> Delta:
        self._text += self._hidden.sub("", piece.text)
        reasoning = self._hidden.sub("", piece.reasoning)
        self._reasoning += reasoning
        return Delta(self._certain_text(), reasoning)

    def _certain_text(self) -> str:
        if self._parser is None:
            return self._show_until(len(self._text))
        if self._text.lstrip()[:1] in ("", "{", "[", "`"):  # the whole text may be a call
            return ""
        start_tag = self._parser.start_tag
        start = self._text.find(start_tag)
        return self._show_until(
            start if start >= 0 else len(self._text) - partial_match_length(self._text, (start_tag,))
        )

    def _show_until(self, stop: int) -> str:
        shown, self._shown = self._text[self._shown : stop], max(self._shown, stop)
        return shown
