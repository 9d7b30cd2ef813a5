"""The body of a request for text completions, and the fields that it shares with chat requests.

https://platform.openai.com/docs/api-reference/completions
https://docs.vllm.ai/en/latest/serving/openai_compatible_server
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from qcfuse_rag.declared_options import pydantic_fields
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import InvalidSetting
from qcfuse_rag.generation.response_format import ResponseFormat
from qcfuse_rag.generation.sampling_params import SAMPLING_SETTINGS, Fidelity, SamplingParams
from qcfuse_rag.prompts.segments import Prompt

T = TypeVar("T")
FailFastList = Annotated[list[T], Field(fail_fast=True)]
"""A list of which only the first error is reported: a report on each of its elements takes longer than parsing."""

PromptAndFormat = tuple[Prompt, ResponseFormat | None]
"""A prompt, and the format of its answers; None if they are text as it was decoded."""

MAX_ANSWERS, MAX_DOCUMENTS = 8, 256
"""Most answers and most documents of a request."""

MAX_TOP_LOGPROBS = 20

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_BIASES = 1000
MAX_DEPTH = 100
"""Copying, rendering and pickling a body all have depth limits of their own, with unclear errors."""

OFF: tuple[Any, ...] = (None, 0, "", [], {})
"""Values that disable most fields; False equals 0."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # OpenAI's fields, retired ones included
    **dict.fromkeys(("functions", "audio", "suffix"), OFF),
    "function_call": (*OFF, "none", "auto"),  # without functions, auto calls none
    "modalities": (*OFF, ["text"]),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # vLLM's fields: constraints on the answer, sampling, the end of the answer and its text, the prompt
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), OFF),
    **dict.fromkeys(("json_schema", "grammar", "format"), OFF),  # llama-server's, and Ollama's
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


def refuse_more(most: int, items: Sequence[object], field: str) -> None:
    """Refuse a request with more than `most` items in a field."""
    if len(items) > most:
        message = f"{field} has {len(items)} entries, and at most {most} are allowed"
        raise InvalidSetting(message, field, "array_above_max_length")


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


DeclaredRequest: Any = create_model(
    "DeclaredRequest", **pydantic_fields(SamplingParams, SAMPLING_SETTINGS, optional=True)
)


class GenerationRequest(DeclaredRequest):  # type: ignore[misc] # a class that pydantic makes has no type
    """A request for answers.

    Unknown fields are ignored, as by other servers; unsupported fields that would change the answer are refused.

    Attributes:
        temperature: see `SamplingParams`, as for the other settings of its names; 0 if it is not given.
        seed: of the first answer; the next ones have the next seeds.
        n: number of answers to a prompt; without a temperature they are equal.
        method: `full` for full prefill, which takes no passage from the store; None for the server's method.
        explain: whether the answer comes with an explanation of how its prompt was computed, texts included.
    """

    model_config = ConfigDict(extra="allow")  # so that `refuse_unsupported` sees the extra fields

    DEFAULT_TOKENS: ClassVar[int]  # limit of an answer whose request sets none
    PROMPT_FIELD: ClassVar[str]  # name of the field with the prompt

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, strict=True)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=-1, strict=True)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=MAX_BIASES)
    stop: str | FailFastList[str] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_ANSWERS, strict=True)
    method: Literal["full"] | None = None
    explain: bool | None = None

    @property
    def prompt_count(self) -> int:
        """Number of prompts."""
        return 1

    @property
    @abstractmethod
    def top_count(self) -> int | None:
        """How many of the likeliest tokens to report for each token, see `SamplingParams.logprobs`."""

    @abstractmethod
    def make_prompt(self, engine: FusionEngine, passages: Sequence[str] | None, number: int = 0) -> PromptAndFormat:
        """Return one of the prompts, with these passages; None finds warmed passages in its text.

        Raises:
            QCFuseError: if there are passages and no place for them.
            InvalidTemplate: if the model's chat template rejects the messages, shows no tools or reads no variable of
                the request.
        """

    @property
    def answer_count(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        """Length limit of an answer; None if the request sets none."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        """The strings that end an answer; empty ones end none."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def refuse_unsupported(self) -> None:
        """Refuse unsupported fields and oversized values by the field's name, and drop the ignored fields."""
        extra = self.model_extra or {}
        for name, value in extra.items():
            if value not in NEUTRAL_VALUES.get(name, (value,)):
                message = f"{name} is not supported; omit it. A schema belongs in response_format"
                raise InvalidSetting(message, name, "unsupported_parameter")
        extra.clear()
        if len(self.stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in self.stops):
            message = f"stop allows at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters"
            raise InvalidSetting(message, "stop")
        level: list[Any] = [self.model_dump()]
        for _ in range(MAX_DEPTH):
            level = [child for value in level for child in _children(value)]
        if level:
            raise InvalidSetting(f"the body is nested too deeply: at most {MAX_DEPTH} levels are allowed")

    def sampling(self, most_tokens: int, fidelity: Fidelity = "fast") -> SamplingParams:
        """Return the sampling settings, with no more tokens than the server's limit; `fidelity` is its default."""
        given = {name: getattr(self, name) for name in SAMPLING_SETTINGS if getattr(self, name) is not None}
        return SamplingParams(
            **{"fidelity": fidelity, **given, "top_k": max(self.top_k or 0, 0)},  # vLLM's -1 keeps all, too
            max_new_tokens=min(self.token_limit or self.DEFAULT_TOKENS, most_tokens),
            logit_bias=tuple((self.logit_bias or {}).items()),
            stop=tuple(filter(None, self.stops)),
            logprobs=self.top_count,
        )


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


CHAT_FIELDS = {
    "messages",
    "documents",
    "tools",
    "tool_choice",
    "response_format",
    "chat_template_kwargs",
    "reasoning_effort",
    "top_logprobs",
}


class CompletionRequest(GenerationRequest):
    """A request to continue texts; its settings are in `GenerationRequest`.

    Attributes:
        prompt: finished text, or several. It gets the model's start token, its special tokens are meant, and warmed
            passages are found in it.
        logprobs: report the probabilities of the answer's tokens, and of so many likeliest tokens.
    """

    DEFAULT_TOKENS: ClassVar[int] = 16
    PROMPT_FIELD: ClassVar[str] = "prompt"

    prompt: str | FailFastList[str | int | FailFastList[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS, strict=True)

    def refuse_unsupported(self) -> None:
        extra: dict[str, Any] = self.model_extra or {}
        for name in CHAT_FIELDS & extra.keys():
            if extra[name] not in OFF:
                message = f"{name} is a field of /v1/chat/completions, not of text completions; omit it"
                raise InvalidSetting(message, name, "unsupported_parameter")
        if not isinstance(self.prompt, str) and not all(isinstance(text, str) for text in self.prompt):
            raise InvalidSetting("prompt has to be text; token ids are not supported", "prompt")
        if not (self.texts and all(self.texts)):
            raise InvalidSetting("prompt has no text", "prompt")
        if self.prompt_count * self.answer_count > MAX_ANSWERS:
            raise InvalidSetting(
                f"{self.prompt_count} prompts with {self.answer_count} answers each, and a request gets at most "
                f"{MAX_ANSWERS} answers; send several requests",
                "prompt",
            )
        super().refuse_unsupported()

    @property
    def texts(self) -> list[str]:
        """The texts to continue."""
        return [self.prompt] if isinstance(self.prompt, str) else [str(text) for text in self.prompt]

    @property
    def prompt_count(self) -> int:
        return len(self.texts)

    @property
    def top_count(self) -> int | None:
        return self.logprobs

    def make_prompt(self, engine: FusionEngine, passages: Sequence[str] | None, number: int = 0) -> PromptAndFormat:
        return engine.prompt_from_text(self.texts[number]), None
