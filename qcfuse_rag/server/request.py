"""What a client may ask: OpenAI's chat completions, with documents in a field of their own.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.response_format import AnswerForm
from qcfuse_rag.generation.sampling import SamplingParams
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.server.unsupported import WITHOUT_EFFECT

MOST_TOKENS = 1024
"""Tokens of an answer that does not say how many it may have, as far as they fit."""

MOST_STOPS, LONGEST_STOP = 16, 256
DEEPEST = 100
TOO_DEEP = f"the body is nested too deep: at most {DEEPEST} levels are taken"
"""What copies it, shows it or sends it to a replica ends at some depth or other, and not in a clear error."""

COLDEST = 0.01
"""Lower temperatures than this, other than 0, overflow."""


class TextPart(BaseModel):
    """A piece of a message's content; images and sound are not answered."""

    type: Literal["text"]
    text: str


class Function(BaseModel):
    """A function that a tool is; what else it has is shown to the model."""

    model_config = ConfigDict(extra="allow")

    name: str
    parameters: dict[str, Any] | None = None


class ToolSpec(BaseModel):
    """A tool."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(BaseModel):
    """A function by its name."""

    name: str


class NamedTool(BaseModel):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class CalledFunction(BaseModel):
    """What an earlier call called, its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class EarlierCall(BaseModel):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return it as chat templates read it, its arguments as an object.

        Raises:
            QCFuseError: if the arguments are no JSON.
        """
        given = self.function.arguments
        try:
            arguments = json.loads(given or "{}") if isinstance(given, str) else given
        except json.JSONDecodeError as error:
            raise QCFuseError(f"the arguments of a tool call are no JSON: {error}") from error
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(BaseModel):
    """A message of the conversation; whatever else it has goes to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[EarlierCall] | None = None

    @property
    def text(self) -> str:
        """Its content as text."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def turn(self) -> dict[str, Any]:
        """Return it as a chat template reads it: content as text, a call's arguments as an object."""
        role = "system" if self.role == "developer" else self.role  # what templates know it as
        turn: dict[str, Any] = {**(self.model_extra or {}), "role": role, "content": self.text}
        if self.tool_calls:
            turn["tool_calls"] = [call.plain() for call in self.tool_calls]
        return turn


class StreamOptions(BaseModel):
    """What a stream brings besides text."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of a request.

    Fields that are not known are passed over, as by other servers; those that would change the answer are refused.

    Attributes:
        documents: retrieved passages in order, as they were warmed; put before the last user message by the RAG prompt.
            Without the field, warmed passages are found in the messages.
        parallel_tool_calls: False for one call at most.
    """

    model_config = ConfigDict(extra="allow")  # for `refuse_unanswerable` to look at

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    documents: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, strict=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, strict=True)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = None

    def refuse_unanswerable(self) -> None:
        """Refuse what this server does not do, and let go of what is passed over.

        Raises:
            QCFuseError: with the field's name.
        """
        others = self.model_extra or {}
        for name, value in others.items():
            if value not in WITHOUT_EFFECT.get(name, (value,)):
                raise QCFuseError(f"{name} is not supported; leave it out")
        others.clear()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
            raise QCFuseError(f"stop takes at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters")
        try:
            plain = self.model_dump()
            json.dumps(plain, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise QCFuseError(f"there is text that is no Unicode: {error.reason}") from error
        except (RecursionError, ValueError) as error:
            raise QCFuseError(TOO_DEEP) from error
        level: list[Any] = [plain]
        for _ in range(DEEPEST):
            level = [inner for one in level for inner in _inside(one)]
        if level:
            raise QCFuseError(TOO_DEEP)
        if self.n not in (None, 1):
            raise QCFuseError(f"n is {self.n}, and only one answer is given; ask again for another")

    @property
    def form(self) -> AnswerForm:
        """What form the answer takes."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return AnswerForm(tools, choice, self.response_format)

    @property
    def says_how_long(self) -> bool:
        """Whether it says how many tokens its answer may have."""
        return (self.max_completion_tokens or self.max_tokens) is not None

    def sampling(self, most_tokens: int) -> SamplingParams:
        """Return how tokens are chosen; at most `most_tokens` of them."""
        wanted = self.max_completion_tokens or self.max_tokens or min(MOST_TOKENS, most_tokens)
        if wanted > most_tokens:
            raise QCFuseError(f"max_tokens is {wanted}, and this server gives at most {most_tokens}")
        return SamplingParams(
            max_new_tokens=wanted,
            temperature=max(self.temperature, COLDEST) if self.temperature else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=self.seed,
        )

    def prompt(self, engine: FusionEngine) -> Prompt:
        """Return the prompt.

        Raises:
            QCFuseError: if there are documents and nobody asks about them.
            InvalidTemplate: if the model's chat template does not take the messages or shows no tools.
        """
        if self.documents is not None and all(message.role != "user" for message in self.messages):
            raise QCFuseError("documents need a user's message that asks about them")
        return self.form.prompt(engine, [message.turn() for message in self.messages], self.documents)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
