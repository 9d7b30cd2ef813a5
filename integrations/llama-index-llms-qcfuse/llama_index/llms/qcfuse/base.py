"""A local LLM whose prefill reuses stored passages."""

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
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate

from llama_index.llms.qcfuse.events import FusionEndEvent
from llama_index.llms.qcfuse.settings import without_class_name
from qcfuse_rag import FusionEngine, Generation, Prompt, SamplingParams
from qcfuse_rag.engine.engine_handle import AnswerRequest, ServedEngine
from qcfuse_rag.engine.request import ScheduledAnswer
from qcfuse_rag.generation.caller_warnings import warn_unused
from qcfuse_rag.generation.response_format import ResponseFormat

SAMPLING_SETTINGS = ("max_new_tokens", "temperature", "top_p", "seed")
LOAD_SETTINGS = ("model", "store", "method", "ratio", "base", "rag_messages", "device", "dtype")
MEDIA = {"image", "audio", "video", "document"}
CALL_SETTINGS = (*SAMPLING_SETTINGS, "stop", "response_format")
Build = Callable[[FusionEngine], Prompt]
dispatcher = get_dispatcher(__name__)


class QCFuseLLM(CustomLLM):
    """A transformers model in this process, with qcfuse-rag's engine around it.

    Nodes that were warmed are found in whatever prompt LlamaIndex makes of them, and not prefilled again; what is not
    found is prefilled like any text. `QCFuseSynthesizer` hands nodes over one by one instead, which needs no finding.

    All calls, from any number of threads and event loops, are answered by one thread: prefilled in the order they came,
    decoded together.

    Example:
        ```python
        from llama_index.llms.qcfuse import QCFuseLLM

        llm = QCFuseLLM(model="HuggingFaceTB/SmolLM2-135M-Instruct", store="kv")
        print(llm.complete("Name a colour."))
        ```
    """

    model_config = ConfigDict(extra="forbid")
    _of_dict = model_validator(mode="before")(without_class_name)

    model: str = Field(description="Hugging Face id, local folder or GGUF file.")
    store: str | None = Field(default=None, description="Folder of stored passages; None keeps them in memory only.")
    method: str | None = Field(default=None, description="What to reuse and recompute; None: the library's default.")
    ratio: float | None = Field(
        default=None, description="Share of reused tokens to recompute; None: the method's own."
    )
    base: str | None = Field(default=None, description="How passages are stored; None: as the method reads.")
    rag_messages: list[tuple[str, str]] | None = Field(
        default=None, description="Messages of the RAG prompt as (role, text), with {context} and {question} once each."
    )
    max_new_tokens: int = Field(default=256, description="Most tokens to generate.", gt=0)
    temperature: float = Field(default=0.0, description="0 is greedy.", ge=0)
    top_p: float = Field(default=1.0, description="Keep the likeliest tokens of this total probability.", gt=0, le=1)
    seed: int | None = Field(default=None, description="Makes sampling repeatable; None draws anew each time.")
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")
    device: str | None = Field(default=None, description="Such as cpu or cuda:0; a GPU if there is one.")
    dtype: str | None = Field(default=None, description="Such as bfloat16; float32 on a CPU.")

    _served: ServedEngine = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Prepare to load the model when it is first needed."""
        super().model_post_init(context)
        self._served = ServedEngine.loading(self._loaded_by)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the model again, by name, in the process that unpickles; an engine that was given is not there.

        LlamaIndex makes the object anew of its fields, which would load another engine and none of its store.
        """
        served = state["__pydantic_private__"]["_served"]
        super().__setstate__(state)
        if served.given:
            self._served = served

    @property
    def portable(self) -> bool:
        """Whether another process can load the same engine over the same store."""
        return not self._served.given and self.store is not None

    @property
    def _loaded_by(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in LOAD_SETTINGS}

    @property
    def _serving(self) -> ServedEngine:
        """What answers.

        Raises:
            MisplacedSetting: if what the engine was loaded by has been changed since, in this or in a copy.
        """
        self._served = self._served.fitting(self._loaded_by)
        return self._served

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name in LlamaIndex."""
        return "QCFuseLLM"

    @classmethod
    def from_engine(cls, engine: FusionEngine, **options: Any) -> QCFuseLLM:
        """Wrap an engine that is already loaded; its method and prompt template are used.

        Raises:
            MisplacedSetting: if an option is one by which engines are loaded, such as `method`.
        """
        served = ServedEngine.of(engine, options=options)
        llm = cls(model=engine.lm.name, **options)
        llm._served = served
        served.loaded_by = llm._loaded_by
        return llm

    @property
    def engine(self) -> FusionEngine:
        """The engine; the model is loaded on first use."""
        return self._serving.engine

    def close(self) -> None:
        """Cancel what is being answered and free the model, unless the engine was given."""
        self._served.close()

    @property
    def metadata(self) -> LLMMetadata:
        """Sizes LlamaIndex plans prompts by."""
        return LLMMetadata(
            context_window=self.engine.lm.window.tokens,
            num_output=self.max_new_tokens,
            is_chat_model=self.engine.lm.tokenizer.chat_template is not None,
            model_name=self.model,
        )

    def sampling(self, **kwargs: Any) -> SamplingParams:
        """Return the sampling settings, with those of one call put in their place."""
        options = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": tuple(self.stop),
            **{name: kwargs[name] for name in SAMPLING_SETTINGS if kwargs.get(name) is not None},
        }
        if kwargs.get("stop"):
            options["stop"] = (kwargs["stop"],) if isinstance(kwargs["stop"], str) else tuple(kwargs["stop"])
        return SamplingParams(**options)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text; unless `formatted`, as a user's turn of the chat template."""
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
        """Answer with an object, and with `qcfuse-rag[structured]` write nothing that does not follow its schema."""
        return super().structured_predict(output_cls, prompt, follow(output_cls, llm_kwargs), **prompt_args)

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> BaseModel:
        """Answer with an object like `structured_predict` without blocking the event loop."""
        return await super().astructured_predict(output_cls, prompt, follow(output_cls, llm_kwargs), **prompt_args)

    def stream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Answer with an object like `structured_predict`, showing what there is of it as it grows."""
        return super().stream_structured_predict(output_cls, prompt, follow(output_cls, llm_kwargs), **prompt_args)

    async def astream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """Answer with an object piece by piece without blocking the event loop."""
        how = follow(output_cls, llm_kwargs)
        return await super().astream_structured_predict(output_cls, prompt, how, **prompt_args)

    def ask(self, build: Build, kwargs: dict[str, Any]) -> ScheduledAnswer:
        """Queue a prompt; for whoever has nodes rather than text.

        Args:
            build: makes the prompt.
            kwargs: settings of this call, see `sampling`.
        """
        return self._serving.ask(self._request(build, kwargs))

    async def aask(self, build: Build, kwargs: dict[str, Any]) -> ScheduledAnswer:
        """Queue a prompt like `ask` without blocking the event loop."""
        return await self._serving.ask_aside(self._request(build, kwargs))

    def answer(self, build: Build, kwargs: dict[str, Any]) -> Generation:
        """Answer a prompt, and tell LlamaIndex's instrumentation what the prefill did."""
        answer = self.ask(build, kwargs)
        try:
            return answer.result()
        finally:
            over(answer)

    async def aanswer(self, build: Build, kwargs: dict[str, Any]) -> Generation:
        """Answer a prompt like `answer` without blocking the event loop; a cancelled task cancels it."""
        answer = await self.aask(build, kwargs)
        try:
            return await answer.aresult()
        finally:
            over(answer)

    def _request(self, build: Build, kwargs: dict[str, Any]) -> AnswerRequest:
        warn_unused(kwargs, CALL_SETTINGS)
        sampling, form = self.sampling(**kwargs), ResponseFormat(response_format=kwargs.get("response_format"))
        return lambda engine: (build(engine), form.sampling(sampling, engine.lm.tokenizer))

    def _text(self, prompt: str, formatted: bool) -> Build:
        wording = self.completion_to_prompt
        if not formatted and wording is not default_completion_to_prompt:
            return lambda engine: engine.prompt_from_text(wording(prompt))

        def build(engine: FusionEngine) -> Prompt:
            as_turn = not formatted and engine.lm.tokenizer.chat_template is not None
            return engine.prompt_from_text([("user", prompt)] if as_turn else prompt)

        return build

    def _conversation(self, messages: Sequence[ChatMessage]) -> Build:
        blocks = MEDIA & {block.block_type for message in messages for block in message.blocks}
        if blocks:
            raise ValueError(f"the model reads text; leave out blocks of {', '.join(sorted(blocks))}")
        if self.messages_to_prompt is not messages_to_prompt:
            text = self.messages_to_prompt(messages)
            return lambda engine: engine.prompt_from_text(text)
        turns = [(message.role.value, message.content or "") for message in messages]
        return lambda engine: engine.prompt_from_text(turns)

    def _completions(self, build: Build, kwargs: dict[str, Any]) -> CompletionResponseGen:
        answer, text = self.ask(build, kwargs), ""
        try:
            for piece in answer:
                text += piece
                yield CompletionResponse(text=text, delta=piece)
        finally:
            over(answer)
        yield self._last(answer)

    async def _acompletions(self, build: Build, kwargs: dict[str, Any]) -> CompletionResponseAsyncGen:
        answer, text = await self.aask(build, kwargs), ""
        try:
            async for piece in answer:
                text += piece
                yield CompletionResponse(text=text, delta=piece)
        finally:
            over(answer)
        yield self._last(answer)

    def _last(self, answer: ScheduledAnswer) -> CompletionResponse:
        """Return the whole answer with its counts, as the last piece of a stream; it adds no text."""
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


def follow(output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return a call's settings with the schema of its answer, if llguidance is there to follow it."""
    if find_spec("llguidance") is None:
        return llm_kwargs or {}
    schema = {"name": output_cls.__name__, "schema": output_cls.model_json_schema()}
    return {"response_format": {"type": "json_schema", "json_schema": schema}, **(llm_kwargs or {})}


def over(answer: ScheduledAnswer) -> None:
    """End a request if it is not over, and tell LlamaIndex's instrumentation what its prefill did."""
    answer.cancel()
    if answer.report is not None:
        dispatcher.event(FusionEndEvent(report=answer.report.to_dict()))
