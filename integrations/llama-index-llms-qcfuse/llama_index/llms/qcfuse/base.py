"""An LLM in this process whose prefill reuses stored passages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
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
    MessageRole,
)
from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate

from llama_index.llms.qcfuse.events import finish
from llama_index.llms.qcfuse.settings import without_class_name
from qcfuse_rag import FusionEngine, Generation, Prompt, SamplingParams
from qcfuse_rag.integrations import (
    SAMPLING_SETTINGS,
    AnswerRequest,
    EngineHandle,
    EngineSettings,
    RequestHandle,
    ResponseFormat,
    warn_unused,
)

SCALAR_SETTINGS = ("max_new_tokens", "temperature", "seed", "fidelity", *SAMPLING_SETTINGS)
CALL_SETTINGS = (*SCALAR_SETTINGS, "stop", "response_format")
MEDIA = {"image", "audio", "video", "document"}
"""Types of message blocks that a text model cannot read."""

PromptFactory = Callable[[FusionEngine], Prompt]
"""Builds a prompt once the engine is loaded."""


class QCFuseLLM(EngineSettings, CustomLLM):
    """A transformers model in this process, run by qcfuse-rag's engine.

    Warmed nodes are found in LlamaIndex's prompts and not prefilled again. All other text is prefilled as usual.
    `QCFuseSynthesizer` passes each node separately instead, so nodes need not be found.

    One thread answers all calls, from any number of threads and event loops. It prefills them in order of arrival and
    decodes them together.

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
            context_window=self.engine.lm.window.tokens,
            num_output=self.max_new_tokens,
            is_chat_model=self.engine.lm.tokenizer.chat_template is not None,
            model_name=self.model,
        )

    def sampling(self, **kwargs: Any) -> SamplingParams:
        """Return the sampling settings; keyword arguments of one call replace the fields."""
        options = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            **{name: getattr(self, name) for name in SAMPLING_SETTINGS},
            "seed": self.seed,
            "fidelity": self.fidelity,
            "stop": tuple(self.stop),
            **{name: kwargs[name] for name in SCALAR_SETTINGS if kwargs.get(name) is not None},
        }
        if kwargs.get("stop"):
            options["stop"] = (kwargs["stop"],) if isinstance(kwargs["stop"], str) else tuple(kwargs["stop"])
        return SamplingParams(**options)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, as a user turn of the chat template unless `formatted`."""
        return self._completion(self.answer(self._text(prompt, formatted), kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Complete a text piece by piece."""
        return self._completions(self._text(prompt, formatted), kwargs)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return self._chat(self._completion(self.answer(self._conversation(messages), kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece."""
        pieces = self._completions(self._conversation(messages), kwargs)
        return (self._chat(piece) for piece in pieces)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text without blocking the event loop."""
        return self._completion(await self.aanswer(self._text(prompt, formatted), kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Complete a text piece by piece without blocking the event loop."""
        return self._acompletions(self._text(prompt, formatted), kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation without blocking the event loop."""
        return self._chat(self._completion(await self.aanswer(self._conversation(messages), kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation piece by piece without blocking the event loop."""
        pieces = self._acompletions(self._conversation(messages), kwargs)
        return (self._chat(piece) async for piece in pieces)

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

    def answer(self, build: PromptFactory, kwargs: dict[str, Any]) -> Generation:
        """Answer a prompt, and report its prefill to LlamaIndex's instrumentation."""
        answer = self.ask(build, kwargs)
        try:
            return answer.result()
        finally:
            finish(answer)

    async def aanswer(self, build: PromptFactory, kwargs: dict[str, Any]) -> Generation:
        """Answer a prompt like `answer` without blocking the event loop; cancelling the task cancels the request."""
        answer = await self.aask(build, kwargs)
        try:
            return await answer.aresult()
        finally:
            finish(answer)

    def _request(self, build: PromptFactory, kwargs: dict[str, Any]) -> AnswerRequest:
        warn_unused(kwargs, CALL_SETTINGS)
        sampling = self.sampling(**kwargs)
        response_format = ResponseFormat(response_format=kwargs.get("response_format"))
        return lambda engine: (build(engine), response_format.sampling(sampling, engine.lm.tokenizer))

    def _text(self, prompt: str, formatted: bool) -> PromptFactory:
        to_prompt = self.completion_to_prompt
        if not formatted and to_prompt is not default_completion_to_prompt:
            return lambda engine: engine.prompt_from_text(to_prompt(prompt))

        def build(engine: FusionEngine) -> Prompt:
            as_turn = not formatted and engine.lm.tokenizer.chat_template is not None
            return engine.prompt_from_text([("user", prompt)] if as_turn else prompt)

        return build

    def _conversation(self, messages: Sequence[ChatMessage]) -> PromptFactory:
        blocks = MEDIA & {block.block_type for message in messages for block in message.blocks}
        if blocks:
            raise ValueError(f"the model reads text; leave out blocks of {', '.join(sorted(blocks))}")
        if self.messages_to_prompt is not messages_to_prompt:
            text = self.messages_to_prompt(messages)
            return lambda engine: engine.prompt_from_text(text)
        turns = [(message.role.value, message.content or "") for message in messages]
        return lambda engine: engine.prompt_from_text(turns)

    def _completions(self, build: PromptFactory, kwargs: dict[str, Any]) -> CompletionResponseGen:
        answer, text = self.ask(build, kwargs), ""
        try:
            for piece in answer:
                text += piece
                yield CompletionResponse(text=text, delta=piece)
        finally:
            finish(answer)
        yield self._last(answer)

    async def _acompletions(self, build: PromptFactory, kwargs: dict[str, Any]) -> CompletionResponseAsyncGen:
        answer, text = await self.aask(build, kwargs), ""
        try:
            async for piece in answer:
                text += piece
                yield CompletionResponse(text=text, delta=piece)
        finally:
            finish(answer)
        yield self._last(answer)

    def _last(self, answer: RequestHandle) -> CompletionResponse:
        """Return the last item of a stream: the complete answer with its token counts, without new text."""
        assert answer.generation is not None
        return self._completion(answer.generation).model_copy(update={"delta": ""})

    def _completion(self, generation: Generation) -> CompletionResponse:
        usage = generation.usage
        counts = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
        }
        return CompletionResponse(text=generation.text, raw=generation.to_dict(), additional_kwargs=counts)

    def _chat(self, completion: CompletionResponse) -> ChatResponse:
        return ChatResponse(
            message=ChatMessage(role=MessageRole.ASSISTANT, content=completion.text),
            delta=completion.delta,
            raw=completion.raw,
            additional_kwargs=completion.additional_kwargs,
        )


def with_schema(output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return a call's settings with the schema of its answer, if llguidance is installed to enforce it."""
    if find_spec("llguidance") is None:
        return llm_kwargs or {}
    schema = {"name": output_cls.__name__, "schema": output_cls.model_json_schema()}
    return {"response_format": {"type": "json_schema", "json_schema": schema}, **(llm_kwargs or {})}
