"""Parse the tool calls that models write, and build grammars of tool calls.

Chat templates define how tools and earlier calls are shown to a model, but not how to parse the model's own calls.
Models were trained on few syntaxes: JSON between tags (Hermes, then Qwen 2.5 and 3, SmolLM3, Granite and more), a list
of JSON after a special token (Mistral), and bare JSON (Llama 3).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.generation.sampling import json_grammar
from qcfuse_rag.prompts.chat_template import ChatTemplate
from qcfuse_rag.prompts.template import Tool

NAMED = 20
"""Most tools that are named where a call names none of them."""

ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys of a call's arguments. A model that was trained on one of them sometimes writes the other."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A valid call: the tool's name, its arguments, and an id of nine letters and digits, which Mistral requires."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9], compare=False)


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """An invalid call: its text and the reason."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A parsed answer: its text, its valid calls, its invalid calls, and the reasoning before it."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[BrokenCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallParser:
    """One syntax of tool calls, of models whose chat templates have `template_marker`.

    The start tag stands before a call or a list of calls; a bare call is written without it.
    """

    template_marker: str
    start_tag: str
    end_tag: str = ""
    arguments_key: str = "arguments"
    is_list: bool = False
    is_bare: bool = False

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedResponse:
        """Parse an answer with its special tokens; the tools are those that the model could call."""
        content, *pieces = text.split(self.start_tag)
        names = sorted({tool["function"]["name"] for tool in tools})
        if not pieces:
            return self._parse_untagged(text, names)
        calls: list[ToolCall | BrokenCall] = []
        text_after_calls = ""
        for piece in pieces:
            try:
                data, stop = json.JSONDecoder().raw_decode(piece.lstrip())
            except (ValueError, RecursionError) as error:  # also of long numbers and deep nesting
                calls.append(BrokenCall(piece.strip(), f"not JSON: {error}"))
                continue
            calls += [self._call(item, names) for item in (data if isinstance(data, list) else [data])]
            text_after_calls += piece.lstrip()[stop:].lstrip().removeprefix(self.end_tag).strip()
        content = content + text_after_calls if text_after_calls else content.rstrip()
        valid = tuple(call for call in calls if isinstance(call, ToolCall))
        return ParsedResponse(content, valid, tuple(call for call in calls if isinstance(call, BrokenCall)))

    def _parse_untagged(self, text: str, names: Sequence[str]) -> ParsedResponse:
        # Small models forget the tag, and Llama 3 was not trained on one. All of the answer has to be JSON.
        try:
            stripped = text.strip()
            fenced = stripped.removeprefix("```")
            fenced = fenced if fenced == stripped else fenced.removeprefix("json")
            data = json.loads(fenced.removesuffix("```"))
        except (ValueError, RecursionError):
            return ParsedResponse(text)
        items = data if isinstance(data, list) else [data]
        if not all(isinstance(item, dict) and any(key in item for key in ARGUMENT_KEYS) for item in items):
            return ParsedResponse(text)
        calls = tuple(call for item in items if isinstance(call := self._call(item, names), ToolCall))
        return ParsedResponse("", calls) if calls and len(calls) == len(items) else ParsedResponse(text)

    def grammar(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool], schema: Mapping[str, Any] | None = None
    ) -> str:
        """Return the grammar of an answer that is exactly one call of one of the tools, see `sampling.Constraint`.

        With a schema, the answer may be JSON that follows it instead.
        """
        parts = ['"[" call "]"' if self.is_list else "call"]
        if not self.is_bare:
            parts = [_terminal(tokenizer, self.start_tag), *parts]
        if self.end_tag:
            parts = [*parts[:1], r'"\n"', *parts[1:], r'"\n"', _terminal(tokenizer, self.end_tag)]
        rules = [f"start: {' '.join(parts)}" + (" | answer" if schema is not None else "")]
        rules += [json_grammar(schema, "answer")] if schema is not None else []
        rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}")
        for number, function in enumerate(tool["function"] for tool in tools):
            begin = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{self.arguments_key}": '
            rules.append(f'call_{number}: {json.dumps(begin, ensure_ascii=False)} arguments_{number} "}}"')
            parameters = function.get("parameters") or {"type": "object", "properties": {}}
            rules.append(json_grammar(parameters, f"arguments_{number}"))
        return "\n".join(rules)

    def _call(self, data: Any, names: Sequence[str]) -> ToolCall | BrokenCall:
        name = data.get("name") if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in names:
            return BrokenCall(json.dumps(data), f"it names none of the tools {', '.join(names[:NAMED])}")
        values = [data[key] for key in ARGUMENT_KEYS if key in data]
        if not values and len(data) > 1:
            return BrokenCall(json.dumps(data), "it has no arguments")
        arguments = values[0] or {} if values else {}
        if not isinstance(arguments, dict):
            return BrokenCall(json.dumps(data), "its arguments are not an object")
        return ToolCall(name, arguments)


TOOL_CALL_PARSERS = (
    ToolCallParser("<tool_call>", "<tool_call>", "</tool_call>"),
    ToolCallParser("[TOOL_CALLS]", "[TOOL_CALLS]", is_list=True),
    ToolCallParser("<|python_tag|>", "<|python_tag|>", arguments_key="parameters", is_bare=True),
    ToolCallParser('"parameters"', "<|python_tag|>", arguments_key="parameters", is_bare=True),
)


def tool_call_parser(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> ToolCallParser:
    """Return the parser for a model's tool calls, chosen by its chat template.

    Raises:
        UnsupportedModel: if no parser matches.
    """
    if parser := _parser_of(tokenizer, tools):
        return parser
    raise UnsupportedModel(
        "it is not known how this model writes tool calls: its chat template has none of "
        + ", ".join(parser.template_marker for parser in TOOL_CALL_PARSERS[:3])
        + ". Use a model that was trained on tools, or ask for JSON by a schema, which works with any model"
    )


def can_call_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a model's chat template shows tools, and its calls can be parsed."""
    return ChatTemplate(tokenizer).shows_tools and _parser_of(tokenizer, [{}]) is not None


def _parser_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> ToolCallParser | None:
    template = tokenizer.get_chat_template(tools=list(tools)) if tokenizer.chat_template is not None else ""
    return next((parser for parser in TOOL_CALL_PARSERS if parser.template_marker in template), None)


def _terminal(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return text as a terminal of a grammar: its special token if it has one, else a string."""
    token = tokenizer.get_added_vocab().get(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
