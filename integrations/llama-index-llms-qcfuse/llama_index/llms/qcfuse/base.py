"""An LLM in this process whose prefill reuses stored passages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing
from importlib.util import find_spec
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate

from llama_index.llms.qcfuse.events import finish
from llama_index.llms.qcfuse.messages import chat_response, logprobs_of, reasoning_kwargs, turn_of
from llama_index.llms.qcfuse.settings import without_class_name
from qcfuse_rag import FusionEngine, Prompt, SamplingParams
from qcfuse_rag.integrations import (
    SAMPLING_SETTINGS,
    AnswerPiece,
    AnswerRequest,
    EngineHandle,
    EngineSettings,
    RequestHandle,
    ResponseFormat,
    ResponseReader,
    warn_unused,
)

CALL_SETTINGS = (
    "max_new_tokens",
    *SAMPLING_SETTINGS,
    "logprobs",
    "top_logprobs",
    "stop",
    "response_format",
    "chat_template_kwargs",
)

PromptFactory = Callable[[FusionEngine], Prompt]
"""Builds a prompt once the engine is loaded."""


class PreparedMessages(list[ChatMessage]):
    """Messages of a prompt that is built in another way than from their text; callbacks and events show the messages.

    Args:
        messages: the messages.
        build: builds the prompt.
    """

    def __init__(self, messages: Iterable[ChatMessage], build: PromptFactory) -> None:
        super().__init__(messages)
        self.build = build


class QCFuseLLM(EngineSettings, CustomLLM):
    """A transformers model in this process, run by qcfuse-rag's engine.

    Warmed nodes are found in LlamaIndex's prompts and not prefilled again. All other text is prefilled as usual.
    `QCFuseSynthesizer` passes each node separately instead, so nodes need not be found.

    One thread answers all calls, from any number of threads and event loops. It prefills short prompts
    first and long ones in parts, and decodes answers together.

    Example:
        ```python
        from llama_index.llms.qcfuse import QCFuseLLM

        llm = QCFuseLLM(model="HuggingFaceTB/SmolLM2-135M-Instruct", store="kv")
        print(llm.complete("Name a colour."))
        ```
    """

    model_config = ConfigDict(extra="forbid")
    _from_dict = model_validator(mode="before")(without_class_name)

    model: str = Field(description="Hugging Face id, local folder or GGUF file.")
    max_new_tokens: int = Field(default=256, description="Most tokens to generate.", gt=0)
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")

    _handle: EngineHandle | None = PrivateAttr(default=None)

    @property
    def portable(self) -> bool:
        """Whether another process can load the same engine over the same store."""
        return self._handle is not None and not self._handle.wrapped and self.store is not None

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name in LlamaIndex."""
        return "QCFuseLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Sizes by which LlamaIndex plans its prompts."""
        return LLMMetadata(
            context_window=self.engine.lm.context_window.tokens,
            num_output=self.max_new_tokens,
            is_chat_model=self.engine.lm.tokenizer.chat_template is not None,
            model_name=self.model,
        )

    def sampling(self, **kwargs: Any) -> SamplingParams:
        """Return the sampling settings; keyword arguments of one call replace the fields."""
        limit = kwargs.get("max_new_tokens")
        return self.sampling_params(
            kwargs,
            max_new_tokens=self.max_new_tokens if limit is None else limit,
            stop=kwargs.get("stop") or self.stop,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, as a user turn of the chat template unless `formatted`."""
        return self.answer(self._text(prompt, formatted, kwargs), kwargs)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Complete a text piece by piece."""
        return self._completions(self._text(prompt, formatted, kwargs), kwargs)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return chat_response(self.answer(self._conversation(messages, kwargs), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece."""
        pieces = self._completions(self._conversation(messages, kwargs), kwargs)
        return (chat_response(piece) for piece in pieces)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text without blocking the event loop."""
        return await self.aanswer(self._text(prompt, formatted, kwargs), kwargs)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Complete a text piece by piece without blocking the event loop."""
        return self._acompletions(self._text(prompt, formatted, kwargs), kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation without blocking the event loop."""
        return chat_response(await self.aanswer(self._conversation(messages, kwargs), kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation piece by piece without blocking the event loop."""
        pieces = self._acompletions(self._conversation(messages, kwargs), kwargs)
        return (chat_response(piece) async for piece in pieces)

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> BaseModel:
        """Answer with an object; with `qcfuse-rag[structured]` the text can only follow its schema."""
        return super().structured_predict(output_cls, prompt, with_schema(output_cls, llm_kwargs), **prompt_args)

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> BaseModel:
        """Answer with an object like `structured_predict` without blocking the event loop."""
        return await super().astructured_predict(output_cls, prompt, with_schema(output_cls, llm_kwargs), **prompt_args)

    def stream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Answer with an object like `structured_predict`, and yield it as it grows."""
        return super().stream_structured_predict(output_cls, prompt, with_schema(output_cls, llm_kwargs), **prompt_args)

    async def astream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """Answer with an object piece by piece without blocking the event loop."""
        llm_kwargs = with_schema(output_cls, llm_kwargs)
        return await super().astream_structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)

    def ask(self, build: PromptFactory, kwargs: dict[str, Any]) -> RequestHandle:
        """Queue a prompt.

        Args:
            build: builds the prompt.
            kwargs: settings of this call, see `sampling`.
        """
        return self._current_handle().submit(self._request(build, kwargs))

    async def aask(self, build: PromptFactory, kwargs: dict[str, Any]) -> RequestHandle:
        """Queue a prompt like `ask` without blocking the event loop."""
        return await self._current_handle().asubmit(self._request(build, kwargs))

    def answer(self, build: PromptFactory, kwargs: dict[str, Any]) -> CompletionResponse:
        """Answer a prompt, and report its prefill to LlamaIndex's instrumentation."""
        request = self.ask(build, kwargs)
        try:
            request.result()
        finally:
            finish(request)
        return self._completion(request, kwargs)

    async def aanswer(self, build: PromptFactory, kwargs: dict[str, Any]) -> CompletionResponse:
        """Answer a prompt like `answer` without blocking the event loop; cancelling the task cancels the request."""
        request = await self.aask(build, kwargs)
        try:
            await request.aresult()
        finally:
            finish(request)
        return self._completion(request, kwargs)

    def read(self, request: RequestHandle, kwargs: dict[str, Any]) -> Iterator[AnswerPiece]:
        """Yield the text and the reasoning of a queued prompt as they come, and report its prefill."""
        reader = self._reader(request, kwargs)
        try:
            for text in request:
                if any(piece := reader.push(text)):
                    yield piece
        finally:
            finish(request)
        assert request.generation is not None
        yield reader.finish(request.generation)[0]

    async def aread(self, request: RequestHandle, kwargs: dict[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        """Yield text and reasoning like `read` without blocking the event loop."""
        reader = self._reader(request, kwargs)
        try:
            async for text in request:
                if any(piece := reader.push(text)):
                    yield piece
        finally:
            finish(request)
        assert request.generation is not None
        yield reader.finish(request.generation)[0]

    def _request(self, build: PromptFactory, kwargs: dict[str, Any]) -> AnswerRequest:
        warn_unused(kwargs, CALL_SETTINGS)
        sampling = self.sampling(**kwargs)
        response_format = _response_format(kwargs)
        return lambda engine: (build(engine), response_format.sampling(sampling, engine.lm.tokenizer))

    def _reader(self, request: RequestHandle, kwargs: dict[str, Any]) -> ResponseReader:
        """Return a reader of an answer; the model is loaded by now."""
        return ResponseReader(self.engine.lm.tokenizer, _response_format(kwargs), request.prompt)

    def _text(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> PromptFactory:
        to_prompt = self.completion_to_prompt
        if not formatted and to_prompt is not default_completion_to_prompt:
            return lambda engine: engine.prompt_from_text(to_prompt(prompt), **_template_kwargs(kwargs))

        def build(engine: FusionEngine) -> Prompt:
            as_turn = not formatted and engine.lm.tokenizer.chat_template is not None
            return engine.prompt_from_text([("user", prompt)] if as_turn else prompt, **_template_kwargs(kwargs))

        return build

    def _conversation(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> PromptFactory:
        if isinstance(messages, PreparedMessages):
            return messages.build
        turns = [turn_of(message) for message in messages]
        custom = self.messages_to_prompt is not messages_to_prompt
        conversation = self.messages_to_prompt(messages) if custom else turns
        return lambda engine: engine.prompt_from_text(conversation, **_template_kwargs(kwargs))

    def _completions(self, build: PromptFactory, kwargs: dict[str, Any]) -> CompletionResponseGen:
        request, text, reasoning = self.ask(build, kwargs), "", ""
        for piece in self.read(request, kwargs):
            text, reasoning = text + piece.text, reasoning + piece.reasoning
            extra = reasoning_kwargs(reasoning, piece.reasoning)
            yield CompletionResponse(text=text, delta=piece.text, additional_kwargs=extra)
        yield self._completion(request, kwargs).model_copy(update={"delta": ""})

    async def _acompletions(self, build: PromptFactory, kwargs: dict[str, Any]) -> CompletionResponseAsyncGen:
        request, text, reasoning = await self.aask(build, kwargs), "", ""
        async with aclosing(self.aread(request, kwargs)) as pieces:
            async for piece in pieces:
                text, reasoning = text + piece.text, reasoning + piece.reasoning
                extra = reasoning_kwargs(reasoning, piece.reasoning)
                yield CompletionResponse(text=text, delta=piece.text, additional_kwargs=extra)
        yield self._completion(request, kwargs).model_copy(update={"delta": ""})

    def _completion(self, request: RequestHandle, kwargs: dict[str, Any]) -> CompletionResponse:
        """Return a finished answer with its token counts; its reasoning is apart from its text."""
        assert request.generation is not None
        _, response = self._reader(request, kwargs).finish(request.generation)
        usage = request.generation.usage
        counts = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
        }
        return CompletionResponse(
            text=response.content,
            raw=request.generation.to_dict(),
            logprobs=logprobs_of(request.generation, self.engine.lm.tokenizer),
            additional_kwargs={**counts, **reasoning_kwargs(response.reasoning)},
        )


def _response_format(kwargs: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat(response_format=kwargs.get("response_format"))


def _template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"chat_template_kwargs": kwargs.get("chat_template_kwargs")}


def with_schema(output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return a call's settings with the schema of its answer, if llguidance is installed to enforce it."""
    if find_spec("llguidance") is None:
        return llm_kwargs or {}
    schema = {"name": output_cls.__name__, "schema": output_cls.model_json_schema()}
    return {"response_format": {"type": "json_schema", "json_schema": schema}, **(llm_kwargs or {})}
