"""How models write tool calls, so that these can be read and asked for.

Chat templates say how tools and earlier calls are shown to a model, and nothing of how its own are to be read. There
are few ways that models were taught: JSON between tags (Hermes, and after it Qwen 2.5 and 3, SmolLM3, Granite and
others), a list of JSON behind a special token (Mistral), bare JSON (Llama 3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import InvalidGrammar, UnsupportedModel
from qcfuse_rag.generation.grammar import closed, compact
from qcfuse_rag.prompts.template import Tool

ARGUMENTS = ("arguments", "parameters")
"""Models that were taught one key write the other now and then."""

FENCES = re.compile(r"^\s*```(?:json)?\s*|\s*```\s*$")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be made: the tool's name and its arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """What was meant to be a call and is none: its text, and why."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class ToolReply:
    """An answer taken apart: what is said, calls to make, and what was meant as one."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[BrokenCall, ...] = ()


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a kind of model writes calls.

    Attributes:
        sign: found in chat templates of such models.
        opens, closes: what stands around a call, or around a list of them.
        arguments: the key of a call's arguments.
        listed: calls stand in one list.
        bare: a call stands alone, without what opens it.
    """

    sign: str
    opens: str
    closes: str = ""
    arguments: str = "arguments"
    listed: bool = False
    bare: bool = False

    def read(self, text: str, tools: Sequence[Tool]) -> ToolReply:
        """Take an answer apart.

        Args:
            text: of the answer, special tokens included.
            tools: that were offered.
        """
        content, *pieces = text.split(self.opens)
        if not pieces:
            return self._read_bare(text, tools)
        calls: list[ToolCall] = []
        broken: list[BrokenCall] = []
        after = ""
        for piece in pieces:
            try:
                found, stop = json.JSONDecoder().raw_decode(piece.lstrip())
            except json.JSONDecodeError as error:
                broken.append(BrokenCall(piece.strip(), f"not JSON: {error}"))
                continue
            for one in found if isinstance(found, list) else [found]:
                call = self._call(one, tools)
                if isinstance(call, ToolCall):
                    calls.append(call)
                else:
                    broken.append(call)
            after += piece.lstrip()[stop:].lstrip().removeprefix(self.closes).strip()
        return ToolReply(content + after if after else content.rstrip(), tuple(calls), tuple(broken))

    def _read_bare(self, text: str, tools: Sequence[Tool]) -> ToolReply:
        """Take an answer apart that opens no call: small models forget to, and Llama 3 never learned it.

        It is a call only if it is JSON that calls one of the tools and nothing else, be it as a block of code.
        """
        try:
            found = json.loads(FENCES.sub("", text))
        except json.JSONDecodeError:
            return ToolReply(text)
        listed = found if isinstance(found, list) else [found]
        if not all(isinstance(one, dict) and any(key in one for key in ARGUMENTS) for one in listed):
            return ToolReply(text)
        calls = [self._call(one, tools) for one in listed]
        right = tuple(call for call in calls if isinstance(call, ToolCall))
        return ToolReply("", right) if right and len(right) == len(calls) else ToolReply(text)

    def grammar(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> str:
        """Return the grammar of an answer that is one call of one of these tools, see `generation.grammar`."""
        definitions: dict[str, Any] = {}
        call: dict[str, Any] = {"anyOf": [self._schema(tool["function"], definitions) for tool in tools]}
        if self.listed:
            call = {"type": "array", "items": call, "minItems": 1, "maxItems": 1}
        parts = ["call"]
        if not self.bare:
            parts = [_terminal(tokenizer, self.opens), *parts]
        if self.closes:
            parts = [*parts[:1], r'"\n"', *parts[1:], r'"\n"', _terminal(tokenizer, self.closes)]
        return f"start: {' '.join(parts)}\ncall: %json {json.dumps(compact({**call, '$defs': definitions}))}"

    def _schema(self, function: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of a call; what its parameters define goes to `definitions`, under a name of its own.

        Raises:
            InvalidGrammar: if what they define is no object.
        """
        parameters = closed(function.get("parameters") or {"type": "object", "properties": {}})
        own: dict[str, str] = {}
        for place in ("$defs", "definitions"):
            found = parameters.pop(place, {})
            if not isinstance(found, Mapping):
                raise InvalidGrammar(f"{place} in the parameters of {function['name']} has to be an object")
            for name, one in found.items():
                own[f"#/{place}/{name}"] = f"{function['name']}.{name}"
                definitions[f"{function['name']}.{name}"] = one
        for name in own.values():
            definitions[name] = _pointed(definitions[name], own)
        return {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                self.arguments: _pointed(parameters, own),
            },
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }

    def _call(self, found: Any, tools: Sequence[Tool]) -> ToolCall | BrokenCall:
        names = {tool["function"]["name"] for tool in tools}
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or name not in names:
            return BrokenCall(json.dumps(found), f"it names none of the tools {', '.join(sorted(names))}")
        given = [found[key] for key in ARGUMENTS if key in found]
        if not given and len(found) > 1:
            return BrokenCall(json.dumps(found), "it has no arguments")
        arguments = given[0] or {} if given else {}
        if not isinstance(arguments, dict):
            return BrokenCall(json.dumps(found), "its arguments are no object")
        return ToolCall(name, arguments)


SYNTAXES = (
    CallSyntax("<tool_call>", "<tool_call>", "</tool_call>"),
    CallSyntax("[TOOL_CALLS]", "[TOOL_CALLS]", listed=True),
    CallSyntax("<|python_tag|>", "<|python_tag|>", arguments="parameters", bare=True),
    CallSyntax('"parameters"', "<|python_tag|>", arguments="parameters", bare=True),
)


def call_syntax(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool]) -> CallSyntax:
    """Return how a model writes calls, by its chat template.

    Raises:
        UnsupportedModel: if it is none of the known ways.
    """
    template = tokenizer.get_chat_template(tools=list(tools)) if tokenizer.chat_template is not None else ""
    for syntax in SYNTAXES:
        if syntax.sign in template:
            return syntax
    raise UnsupportedModel(
        "it is not known how this model writes tool calls: its chat template names none of "
        + ", ".join(syntax.sign for syntax in SYNTAXES[:3])
        + ". Take a model that was taught tools, or ask for JSON by a schema, which any model can give"
    )


def _pointed(schema: Any, names: Mapping[str, str]) -> Any:
    """Return a schema whose references lead to definitions under other names."""
    if isinstance(schema, list):
        return [_pointed(one, names) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _pointed(value, names) for key, value in schema.items()}
    if isinstance(found.get("$ref"), str) and found["$ref"] in names:
        found["$ref"] = f"#/$defs/{names[found['$ref']]}"
    return found


def _terminal(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a grammar's form of text: the token that it is, if it is one of its own."""
    token = tokenizer.get_added_vocab().get(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
