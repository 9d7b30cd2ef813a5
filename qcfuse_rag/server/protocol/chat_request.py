"""The body of a chat request: OpenAI's chat completions, with an extra field for documents.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import InvalidSetting
from qcfuse_rag.generation.response_format import ResponseFormat
from qcfuse_rag.server.protocol.generation_request import (
    MAX_DOCUMENTS,
    MAX_TOP_LOGPROBS,
    FailFastList,
    GenerationRequest,
    PromptAndFormat,
    refuse_more,
)

DELIMITERS = (
    (re.compile(r"<source [^<>]*>"), "</source>"),
    (re.compile(r"\[CONTEXT \d{1,6}\]:\n"), "\n[END CONTEXT "),
    (re.compile(r"<!\[CDATA\["), "]]>"),
)
"""The text before and after a passage that a client with a retrieval of its own has put into a message.

The clients are Open WebUI 0.12 (`<source id="1" ...>`), AnythingLLM (`[CONTEXT 0]:`) and LibreChat (`<![CDATA[`).
"""


def delimited_passages(text: str) -> list[str]:
    """Return the passages between delimiters in a message, those of one client after another.

    A passage begins at the last opening delimiter before its closing delimiter, because Open WebUI explains its
    delimiters to the model. The time is linear in the length of the text, whatever delimiters it has.
    """
    passages = []
    for opening, closing in DELIMITERS:
        begin = 0
        while (end := text.find(closing, begin)) >= 0:
            openings = list(opening.finditer(text, begin, end))
            if openings and (passage := text[openings[-1].end() : end].strip()):
                passages.append(passage)
            begin = end + len(closing)
    return passages


TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class TextPart(BaseModel):
    """A part of a message's content, also in the forms of OpenAI's responses; only text is supported."""

    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def _read(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind in TEXT_PARTS:
            text = part.get("text", part.get(kind)) if isinstance(part, dict) else None
            return part if text is None else {"type": kind, "text": text}
        refusal = "the model reads text; describe parts of other types, or leave them out: {kind}"
        raise PydanticCustomError("unsupported", refusal, {"kind": kind})


class Function(BaseModel):
    """A tool's function; its other fields are shown to the model."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSpec(BaseModel):
    """A tool."""

    type: Literal["function"] = "function"
    function: Function


class CalledFunction(BaseModel):
    """The function of an earlier call, with its arguments as JSON; models also write what is none."""

    name: str
    arguments: Any = None


class EarlierCall(BaseModel):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call for a chat template, with its arguments as an object, or as they are if they are none."""
        arguments = self.function.arguments or {}
        with suppress(ValueError, RecursionError):  # a model has written it, and clients send it with every later turn
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
            arguments = parsed if isinstance(parsed, dict) else arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(BaseModel):
    """A message of the conversation; its other fields go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | FailFastList[TextPart] | None = None
    refusal: str | None = None
    tool_calls: FailFastList[EarlierCall] | None = None
    function_call: CalledFunction | None = None

    @property
    def text(self) -> str:
        """The content as text, or the refusal in its place."""
        content = self.content or self.refusal or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def turn(self) -> dict[str, Any]:
        """Return the message for a chat template, with its content as text."""
        turn: dict[str, Any] = {**(self.model_extra or {}), "role": self.role, "content": self.text}
        calls = self.tool_calls or (self.function_call and [EarlierCall(function=self.function_call)])
        if calls:
            turn["tool_calls"] = [call.for_template() for call in calls]
        return turn


class ChatRequest(GenerationRequest):
    """A chat request; its settings are in `GenerationRequest`.

    Attributes:
        messages: the conversation.
        documents: retrieved passages in order, exactly as they were warmed. The RAG prompt puts them before the last
            user message. `library` lets the server retrieve them. Without the field, the server retrieves if it does so
            by default; else warmed passages are found in the messages.
        parallel_tool_calls: False allows one call at most.
        chat_template_kwargs: variables of the model's chat template, such as `{"enable_thinking": false}`.
        reasoning_effort: the variable of that name of the model's chat template.
    """

    DEFAULT_TOKENS: ClassVar[int] = 1024
    PROMPT_FIELD: ClassVar[str] = "messages"

    messages: FailFastList[ChatMessage] = Field(min_length=1)
    documents: FailFastList[str] | Literal["library"] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, strict=True)
    tools: FailFastList[ToolSpec] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        refuse_more(MAX_DOCUMENTS, self.given_documents or (), "documents")
        if self.top_logprobs and not self.logprobs:
            raise InvalidSetting("top_logprobs needs logprobs to be true", "top_logprobs")

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def given_documents(self) -> list[str] | None:
        """The passages in the request; None if it has none of its own."""
        return None if self.documents == "library" else self.documents

    @property
    def questions(self) -> tuple[str, str | None]:
        """The text of the last user message, and of the user message before it, if there is one.

        Raises:
            InvalidSetting: if there is no user message.
        """
        texts = [message.text for message in self.messages if message.role == "user"]
        if not texts:
            raise InvalidSetting("documents need a user's message that asks about them", "messages")
        return texts[-1], texts[-2] if len(texts) > 1 else None

    @property
    def delimited_passages(self) -> list[str]:
        """The passages that the client has put into messages itself, see `DELIMITERS`."""
        return [
            text
            for message in self.messages
            if message.role != "assistant"
            for text in delimited_passages(message.text)
        ]

    def make_prompt(self, engine: FusionEngine, passages: Sequence[str] | None, number: int = 0) -> PromptAndFormat:
        """Return the prompt, with passages before the last user message."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        several_calls = self.parallel_tool_calls is not False
        response_format = ResponseFormat(tools, self.tool_choice, self.response_format, several_calls)
        if passages is not None:
            _ = self.questions  # raises if there is none
        turns = [message.turn() for message in self.messages]
        kwargs = self._template_kwargs(engine.prompts.chat_template.variables)
        return engine.chat_prompt(turns, response_format, passages, chat_template_kwargs=kwargs), response_format

    def _template_kwargs(self, variables: frozenset[str]) -> dict[str, Any]:
        """Return the variables that the request sets, of those that the model's chat template reads.

        Raises:
            InvalidSetting: if it names an effort, the template reads none, and it is not OpenAI's default.
        """
        kwargs = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return kwargs
        if "reasoning_effort" in variables:
            return {"reasoning_effort": self.reasoning_effort, **kwargs}
        if self.reasoning_effort != "medium":
            message = "this model's chat template reads no reasoning_effort; omit it"
            raise InvalidSetting(message, "reasoning_effort", "unsupported_parameter")
        return kwargs
