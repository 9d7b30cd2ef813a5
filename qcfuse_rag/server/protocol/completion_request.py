"""The body of a request for text completions: OpenAI's older interface, which continues finished text.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.server.protocol.generation_request import (
    MAX_ANSWERS,
    MAX_TOP_LOGPROBS,
    OFF,
    FailFastList,
    GenerationRequest,
)

CHAT_FIELDS = (
    "messages",
    "documents",
    "tools",
    "tool_choice",
    "response_format",
    "chat_template_kwargs",
    "reasoning_effort",
    "top_logprobs",
)


class CompletionRequest(GenerationRequest):
    """A request to continue texts; its settings are in `GenerationRequest`.

    Attributes:
        prompt: finished text, or several. It gets the model's start token, its special tokens are meant, and warmed
            passages are found in it.
        logprobs: report the probabilities of the answer's tokens, and of so many likeliest tokens.
    """

    DEFAULT_TOKENS: ClassVar[int] = 16

    prompt: str | FailFastList[str | int | FailFastList[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)

    def refuse_unsupported(self) -> None:
        """Refuse unsupported fields and oversized values by the field's name, and drop the ignored fields."""
        extra: dict[str, Any] = self.model_extra or {}
        for name in CHAT_FIELDS:
            if extra.get(name) not in OFF:
                raise QCFuseError(f"{name} is a field of /v1/chat/completions, not of text completions; omit it")
        if not isinstance(self.prompt, str) and not all(isinstance(text, str) for text in self.prompt):
            raise QCFuseError("prompt has to be text; token ids are not supported")
        if not self.texts:
            raise QCFuseError("prompt has no text")
        if self.prompt_count * self.answer_count > MAX_ANSWERS:
            raise QCFuseError(
                f"{self.prompt_count} prompts with {self.answer_count} answers each, and a request gets at most "
                f"{MAX_ANSWERS} answers; send several requests"
            )
        super().refuse_unsupported()

    @property
    def texts(self) -> list[str]:
        """The texts to continue."""
        return [self.prompt] if isinstance(self.prompt, str) else [str(text) for text in self.prompt]

    @property
    def prompt_count(self) -> int:
        """Number of prompts."""
        return len(self.texts)

    @property
    def top_count(self) -> int | None:
        """How many of the likeliest tokens to report for each token."""
        return self.logprobs

    def make_prompt(self, engine: FusionEngine, passages: Sequence[str] | None, number: int = 0) -> Prompt:
        """Return the prompt of a text; warmed passages are found in it."""
        return engine.prompt_from_text(self.texts[number])
