"""The response format of a chat request: tool calls, JSON by a schema, or free text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.decode import Generation
from qcfuse_rag.generation.detokenizer import partial_mark_length
from qcfuse_rag.generation.grammar import json_grammar
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.generation.tool_parsers import BrokenCall, ParsedResponse, tool_call_parser
from qcfuse_rag.prompts.builder import PromptBuilder
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.prompts.template import Tool, Turn


class PromptSource(Protocol):
    """Builds prompts, as `FusionEngine` does."""

    @property
    def prompts(self) -> PromptBuilder:
        """The builder of prompt parts."""
        ...

    def prompt(
        self, question: str, passages: Sequence[str] = (), history: Sequence[Turn] = (), tools: Sequence[Tool] = ()
    ) -> Prompt:
        """Build a prompt from a question and passages."""
        ...

    def prompt_from_text(self, conversation: Sequence[Turn] | str, tools: Sequence[Tool] = ()) -> Prompt:
        """Build a prompt from a conversation, and find warmed passages in its text."""
        ...


ToolChoice = str | bool | Mapping[str, Any] | None
"""Which tool to call: `auto` or None lets the model decide, `none` forbids calls, `required` or `any` demands a call; a
tool's name, or `{"type": "function", "function": {"name": ...}}`, demands a call of that tool."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The allowed form of an answer, in the terms of OpenAI's chat API.

    Attributes:
        tools: all tools, as `{"type": "function", "function": {...}}`.
        tool_choice: which of the tools to call.
        response_format: `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema":
            {"schema": ...}}`; None is text.

    Raises:
        QCFuseError: if the choice names an unknown tool, the format's type is unknown, or both tools and JSON are
            requested.
    """

    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = None
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        schema = self.schema
        if self.required_tools == () and self.tool_choice in (True, "any", "required"):
            raise QCFuseError("tool_choice demands a call, and there are no tools to call")
        if self.visible_tools and schema is not None:
            raise QCFuseError(
                "ask for tools or for JSON by a schema, not for both; ask for the other in a later request"
            )

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
        choice = self.tool_choice
        function = choice.get("function") if isinstance(choice, Mapping) else {"name": choice}
        name = function.get("name") if isinstance(function, Mapping) else None
        required = [tool for tool in self.tools if tool["function"]["name"] == name]
        if not required:
            names = ", ".join(tool["function"]["name"] for tool in self.tools) or "none"
            raise QCFuseError(f"tool_choice names {name!r}, which is not among the given tools: {names}")
        return required

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that the answer must follow; None if the answer is text."""
        requested = self.response_format or {"type": "text"}
        if requested.get("type") in ("text", "json_object"):
            return {"type": "object"} if requested["type"] == "json_object" else None
        try:
            if requested["type"] == "json_schema":
                schema = requested["json_schema"]["schema"]
                if isinstance(schema, Mapping):
                    return schema
        except (KeyError, TypeError):
            pass
        raise QCFuseError(
            'response_format has to be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            f'"json_schema": {{"schema": ...}}}}, not {dict(requested)}'
        )

    def prompt(
        self, engine: PromptSource, turns: Sequence[Mapping[str, Any]], passages: Sequence[str] | None = None
    ) -> Prompt:
        """Return the prompt of a conversation, whose last question mentions the required schema.

        Args:
            engine: builds the prompt.
            turns: messages for a chat template. The question is the last message of the user, or the last message if
                the user wrote none. Other messages, such as tool results, may follow.
            passages: passages to put before the question, with the RAG prompt. With None, warmed passages are found in
                the messages.

        Raises:
            InvalidTemplate: if the model's chat template rejects the messages or does not show tools.
        """
        last_question = max(
            (index for index, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns) - 1
        )
        history, later_turns = turns[:last_question], turns[last_question + 1 :]
        question = self.with_schema_hint(turns[last_question]["content"])
        conversation: list[Turn]
        if passages is None:
            conversation = [*history, {**turns[last_question], "content": question}, *later_turns]
            return engine.prompt_from_text(conversation, self.visible_tools)
        if later_turns:
            conversation = [*engine.prompts.turns(question, passages, history), *later_turns]
            return engine.prompt_from_text(conversation, self.visible_tools)
        return engine.prompt(question, passages, history, self.visible_tools)

    def with_schema_hint(self, question: str) -> str:
        """Return a question, followed by the schema that the answer must follow, if there is one with properties."""
        if self.schema is None or "properties" not in self.schema:
            return question
        return f"{question}\n\nAnswer with JSON that follows this schema: {json.dumps(self.schema)}"

    def sampling(self, params: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
        """Return sampling settings with the grammar of this format.

        Raises:
            UnsupportedModel: if there are tools and the model's syntax of tool calls is unknown.
        """
        parser = (
            tool_call_parser(tokenizer, self.tools) if self.visible_tools else None
        )  # refuse unreadable calls early
        if parser is not None and self.required_tools:
            grammar = parser.grammar(tokenizer, self.required_tools)
        elif self.schema is not None:
            grammar = json_grammar(self.schema)
        else:
            return params
        return replace(params, grammar=grammar)


class ResponseReader:
    """Separates the text of one streamed answer from its tool calls.

    Args:
        tokenizer: of the model.
        response_format: of the answer.

    Raises:
        UnsupportedModel: if there are tools and the model's syntax of tool calls is unknown.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, response_format: ResponseFormat) -> None:
        self._tokenizer, self._tools = tokenizer, response_format.visible_tools
        self._requires_call = bool(response_format.required_tools)
        self._parser = tool_call_parser(tokenizer, self._tools) if self._tools else None
        self._text = ""
        self._shown = 0
        # Streamed text omits special tokens, so a call that starts with one is visible only in the finished answer.
        self._hidden_start = self._parser is not None and self._parser.start_tag in tokenizer.all_special_tokens

    def push(self, piece: str) -> str:
        """Add a piece of the answer; return text that is certainly not part of a call, often empty."""
        self._text += piece
        if self._parser is None:
            return self._show_until(len(self._text))
        if self._hidden_start or self._text.lstrip()[:1] in ("", "{", "[", "`"):  # the whole text may be a call
            return ""
        start_tag = self._parser.start_tag
        start = self._text.find(start_tag)
        return self._show_until(
            start if start >= 0 else len(self._text) - partial_mark_length(self._text, (start_tag,))
        )

    def finish(self, generation: Generation) -> tuple[str, ParsedResponse]:
        """Parse the finished answer; return the content that was not shown yet, and the parsed answer."""
        if self._parser is None or generation.finish_reason == "stop":
            text = generation.text
        else:  # decode again, with the special tokens that start a call
            ids = generation.ids[:-1] if generation.finish_reason == "end" else generation.ids
            text = self._tokenizer.decode(ids)
        response = ParsedResponse(text) if self._parser is None else self._parser.parse(text, self._tools)
        if not response.calls and not response.broken:
            incomplete = BrokenCall(generation.text, "the call is incomplete")
            response = (
                ParsedResponse("", broken=(incomplete,)) if self._requires_call else ParsedResponse(generation.text)
            )
        return response.content[self._shown :], response

    def _show_until(self, stop: int) -> str:
        shown, self._shown = self._text[self._shown : stop], max(self._shown, stop)
        return shown
