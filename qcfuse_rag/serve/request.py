"""What a client may ask: OpenAI's chat completions, with documents in a field of their own.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qcfuse_rag.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generate.answer_form import AnswerForm
from qcfuse_rag.generate.sampling import SamplingParams
from qcfuse_rag.prompt.segments import Prompt
from qcfuse_rag.prompt.template import Turn

MOST_TOKENS = 1024
"""Tokens of an answer that does not say how many it may have."""


class TextPart(BaseModel):
    """A piece of a message's content; images and sound are not answered."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of the conversation; whatever else it has goes to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """Its content as text."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def turn(self) -> Turn:
        """Return it as a chat template reads it: content as text, a call's arguments as an object."""
        turn: dict[str, Any] = {**(self.model_extra or {}), "role": self.role, "content": self.text}
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_with_arguments(call) for call in turn["tool_calls"]]
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
    """

    model: str = ""
    messages: list[ChatMessage] = Field(min_length=1)
    documents: list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    n: int | None = None
    logprobs: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def refuse_unanswerable(self) -> None:
        """Refuse what this server does not do.

        Raises:
            QCFuseError: with the field's name.
        """
        for name in ("logprobs", "presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise QCFuseError(f"{name} is not supported; leave it out")
        if self.n not in (None, 1):
            raise QCFuseError(f"n is {self.n}, and only one answer is given; ask again for another")

    @property
    def form(self) -> AnswerForm:
        """What form the answer takes."""
        return AnswerForm(self.tools or (), self.tool_choice, self.response_format)

    def sampling(self, most_tokens: int) -> SamplingParams:
        """Return how tokens are chosen; at most `most_tokens` of them."""
        wanted = self.max_completion_tokens or self.max_tokens or min(MOST_TOKENS, most_tokens)
        if wanted > most_tokens:
            raise QCFuseError(f"max_tokens is {wanted}, and this server gives at most {most_tokens}")
        return SamplingParams(
            max_new_tokens=wanted,
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=self.seed,
        )

    def prompt(self, engine: FusionEngine) -> Prompt:
        """Return the prompt.

        Raises:
            InvalidTemplate: if the model's chat template does not take the messages or shows no tools.
        """
        turns = [message.turn() for message in self.messages]
        tools = self.form.tools
        if self.documents is None:
            return engine.plain(turns, tools)
        asked = max((at for at, one in enumerate(self.messages) if one.role == "user"), default=-1)
        if asked < 0:
            raise QCFuseError("documents need a user's message that asks about them")
        question = self.messages[asked].text
        if asked < len(turns) - 1:  # such as what tools have said since
            return engine.plain(
                [*engine.prompts.turns(question, self.documents, turns[:asked]), *turns[asked + 1 :]], tools
            )
        return engine.prompt(question, self.documents, turns[:asked], tools)


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except json.JSONDecodeError as error:
            raise QCFuseError(f"the arguments of a tool call are no JSON: {error}") from error
    return {**call, "function": function}
