"""The body of a chat request: OpenAI's chat completions, with an extra field for documents.

https://platform.openai.com/docs/api-reference/chat
https://docs.vllm.ai/en/latest/serving/openai_compatible_server
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.response_format import ResponseFormat
from qcfuse_rag.generation.sampling import Fidelity, SamplingParams
from qcfuse_rag.prompts.segments import Prompt

T = TypeVar("T")
FailFastList = Annotated[list[T], Field(fail_fast=True)]
"""A list of which only the first error is reported: a report on each of its elements takes longer than parsing."""

DEFAULT_TOKENS = 1024
"""Length limit of an answer whose request sets none; the context window may limit it further."""

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_BIASES = 1000
MAX_DEPTH = 100
TOO_DEEP = f"the body is nested too deeply: at most {MAX_DEPTH} levels are allowed"
"""Copying, rendering and pickling a body all have depth limits of their own, with unclear errors."""

MIN_TEMPERATURE = 0.01
"""Lower temperatures, except 0, overflow."""

OFF: tuple[Any, ...] = (None, 0, "", [], {})
"""Values that disable most fields; False equals 0."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # OpenAI's fields, retired ones included
    **dict.fromkeys(("logprobs", "top_logprobs"), OFF),
    **dict.fromkeys(("functions", "audio"), OFF),
    "function_call": (*OFF, "none", "auto"),  # without functions, auto calls none
    "modalities": (*OFF, ["text"]),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # vLLM's fields: constraints on the answer, sampling, the end of the answer and its text, the prompt
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), OFF),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors", "use_beam_search"), OFF),
    **dict.fromkeys(("min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"), OFF),
    **dict.fromkeys(("echo", "prompt_logprobs", "chat_template"), OFF),
    **dict.fromkeys(("continue_final_message", "add_special_tokens"), OFF),
    "length_penalty": (None, 1),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), (None, True)),
    "truncate_prompt_tokens": (None, -1),
    "best_of": (*OFF, 1),
}
"""Unsupported fields that would change the answer, each with the values that would not."""


class TextPart(BaseModel):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class Function(BaseModel):
    """A tool's function; its other fields are shown to the model."""

    model_config = ConfigDict(extra="allow")

    name: str
    parameters: dict[str, Any] | None = None


class ToolSpec(BaseModel):
    """A tool."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(BaseModel):
    """The name of a function."""

    name: str


class NamedTool(BaseModel):
    """A tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class CalledFunction(BaseModel):
    """The function of an earlier call, with its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class EarlierCall(BaseModel):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call for a chat template, with its arguments as an object."""
        arguments = self.function.arguments
        try:
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except json.JSONDecodeError as error:
            raise QCFuseError(f"the arguments of a tool call are not JSON: {error}") from error
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(BaseModel):
    """A message of the conversation; its other fields go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | FailFastList[TextPart] | None = None
    tool_calls: FailFastList[EarlierCall] | None = None

    @property
    def text(self) -> str:
        """The content as text."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def turn(self) -> dict[str, Any]:
        """Return the message for a chat template, with its content as text."""
        role = "system" if self.role == "developer" else self.role  # templates know no developer role
        turn: dict[str, Any] = {**(self.model_extra or {}), "role": role, "content": self.text}
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return turn


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of a request.

    Unknown fields are ignored, as by other servers; unsupported fields that would change the answer are refused.

    Attributes:
        documents: retrieved passages in order, exactly as they were warmed. The RAG prompt puts them before the last
            user message. `library` lets the server retrieve them. Without the field, the server retrieves if it does so
            by default; else warmed passages are found in the messages.
        parallel_tool_calls: False allows one call at most.
        chat_template_kwargs: variables of the model's chat template, such as `{"enable_thinking": false}`.
        reasoning_effort: the variable of that name of the model's chat template.
        fidelity: how closely the answer follows full prefill's, see `generation.sampling.Fidelity`; None leaves it to
            the server.
        method: `full` for full prefill, which takes no passage from the store; None for the server's method.
        explain: whether the answer comes with an explanation of how its prompt was computed, texts included.
    """

    model_config = ConfigDict(extra="allow")  # so that `refuse_unsupported` sees the extra fields

    model: str | None = None
    messages: FailFastList[ChatMessage] = Field(min_length=1)
    documents: FailFastList[str] | Literal["library"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, strict=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, strict=True)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, strict=True)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=MAX_BIASES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | FailFastList[str] | None = None
    tools: FailFastList[ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    fidelity: Fidelity | None = None
    method: Literal["full"] | None = None
    explain: bool | None = None

    def refuse_unsupported(self) -> None:
        """Refuse unsupported fields and oversized values by the field's name, and drop the ignored fields."""
        extra = self.model_extra or {}
        for name, value in extra.items():
            if value not in NEUTRAL_VALUES.get(name, (value,)):
                raise QCFuseError(f"{name} is not supported; omit it")
        extra.clear()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise QCFuseError(f"stop allows at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters")
        try:
            plain = self.model_dump()
            json.dumps(plain, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise QCFuseError(f"the body has text that is not valid Unicode: {error.reason}") from error
        except (RecursionError, ValueError) as error:
            raise QCFuseError(TOO_DEEP) from error
        level: list[Any] = [plain]
        for _ in range(MAX_DEPTH):
            level = [child for value in level for child in _children(value)]
        if level:
            raise QCFuseError(TOO_DEEP)
        if self.n not in (None, 1):
            raise QCFuseError(f"n is {self.n}, but only one answer is given; send the request again for another answer")

    def to_response_format(self) -> ResponseFormat:
        """Return the response format."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        choice = self.tool_choice.model_dump() if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return ResponseFormat(tools, choice, self.response_format)

    @property
    def has_token_limit(self) -> bool:
        """Whether the request limits the tokens of its answer."""
        return (self.max_completion_tokens or self.max_tokens) is not None

    def sampling(self, most_tokens: int, fidelity: Fidelity = "fast") -> SamplingParams:
        """Return the sampling settings; refuse more tokens than the server's limit.

        Args:
            most_tokens: the server's limit.
            fidelity: of requests that name none.
        """
        max_tokens = self.max_completion_tokens or self.max_tokens or min(DEFAULT_TOKENS, most_tokens)
        if max_tokens > most_tokens:
            raise QCFuseError(f"max_tokens is {max_tokens}, and this server gives at most {most_tokens}")
        return SamplingParams(
            max_new_tokens=max_tokens,
            temperature=max(self.temperature, MIN_TEMPERATURE) if self.temperature else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),  # vLLM's -1 keeps all, too
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((self.logit_bias or {}).items()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=self.seed,
            fidelity=self.fidelity or fidelity,
        )

    @property
    def given_documents(self) -> list[str] | None:
        """The passages in the request; None if it has none of its own."""
        return None if self.documents == "library" else self.documents

    @property
    def questions(self) -> tuple[str, str | None]:
        """The text of the last user message, and of the user message before it, if there is one.

        Raises:
            QCFuseError: if there is no user message.
        """
        texts = [message.text for message in self.messages if message.role == "user"]
        if not texts:
            raise QCFuseError("documents need a user's message that asks about them")
        return texts[-1], texts[-2] if len(texts) > 1 else None

    def prompt(self, engine: FusionEngine, passages: Sequence[str] | None) -> Prompt:
        """Return the prompt.

        Args:
            engine: makes the prompt.
            passages: to put before the last user message; None finds warmed passages in the messages.

        Raises:
            QCFuseError: if there are passages and no user message.
            InvalidTemplate: if the model's chat template rejects the messages, does not show tools or does not read
                one of the variables.
        """
        if passages is not None:
            assert self.questions
        turns = [message.turn() for message in self.messages]
        kwargs = self._template_kwargs(engine.prompts.variables)
        return self.to_response_format().prompt(engine, turns, passages, chat_template_kwargs=kwargs)

    def _template_kwargs(self, variables: frozenset[str]) -> dict[str, Any]:
        """Return the variables that the request sets, of those that the model's chat template reads.

        Raises:
            QCFuseError: if it names an effort, the template reads none, and it is not OpenAI's default.
        """
        kwargs = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return kwargs
        if "reasoning_effort" in variables:
            return {"reasoning_effort": self.reasoning_effort, **kwargs}
        if self.reasoning_effort != "medium":
            raise QCFuseError("this model's chat template reads no reasoning_effort; omit it")
        return kwargs


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
