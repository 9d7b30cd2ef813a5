"""A local chat model whose prefill reuses stored documents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, model_validator

from langchain_qcfuse.messages import answer_message, documents_in, last_chunk, texts_of, turn_of
from langchain_qcfuse.sources import SOURCE_KEY, access_of, source_of
from langchain_qcfuse.structured import called, structured
from qcfuse_rag import FusionEngine, Generation, Prompt, SamplingParams, WarmSummary
from qcfuse_rag.engine.engine_handle import AnswerRequest, ServedEngine
from qcfuse_rag.engine.request import ScheduledAnswer
from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.generation.caller_warnings import warn_caller, warn_unused
from qcfuse_rag.generation.response_format import ResponseFormat, ResponseReader
from qcfuse_rag.prompts.special_tokens import RenderedText

SERVICE_SETTINGS = ("api_key", "base_url", "timeout", "max_retries", "streaming")
CALL_SETTINGS = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "documents",
    "tools",
    "tool_choice",
    "response_format",
    "stream",  # read by LangChain itself
)
LOAD_SETTINGS = ("model_name", "store", "method", "ratio", "base", "rag_messages", "device", "dtype")
ANSWER_SETTINGS = (*LOAD_SETTINGS, "max_tokens", "temperature", "top_p", "seed", "stop")


class ChatQCFuse(BaseChatModel):
    """A transformers model in this process, with qcfuse-rag's engine around it.

    Documents that were warmed are found in whatever messages a chain makes of them, and not prefilled again. Given as
    the keyword argument `documents`, or as `text-plain` blocks of messages, they are put before the last message's text
    by the RAG prompt, and need not be found.

    All calls, from any number of threads and event loops, are answered by one thread: prefilled in the order they came,
    decoded together.

    Example:
        ```python
        from langchain_qcfuse import ChatQCFuse

        chat = ChatQCFuse(model="HuggingFaceTB/SmolLM2-135M-Instruct", store="kv")
        chat.warm(documents)
        print(chat.invoke("Who keeps the key?", documents=documents).content)
        ```
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid")

    model_name: str = Field(alias="model", description="Hugging Face id, local folder or GGUF file.")
    store: str | None = Field(default=None, description="Folder of stored documents; None keeps them in memory only.")
    method: str | None = Field(default=None, description="What to reuse and recompute; None: the library's default.")
    ratio: float | None = Field(
        default=None, description="Share of reused tokens to recompute; None: the method's own."
    )
    base: str | None = Field(default=None, description="How documents are stored; None: as the method reads.")
    rag_messages: list[tuple[str, str]] | None = Field(
        default=None, description="Messages of the RAG prompt as (role, text), with {context} and {question} once each."
    )
    max_tokens: int = Field(default=256, description="Most tokens to generate.", gt=0)
    temperature: float = Field(default=0.0, description="0 is greedy.", ge=0)
    top_p: float = Field(default=1.0, description="Keep the likeliest tokens of this total probability.", gt=0, le=1)
    seed: int | None = Field(default=None, description="Makes sampling repeatable; None draws anew each time.")
    stop: list[str] | None = Field(default=None, description="Strings that end an answer.")
    device: str | None = Field(default=None, description="Such as cpu or cuda:0; a GPU if there is one.")
    dtype: str | None = Field(default=None, description="Such as bfloat16; float32 on a CPU.")

    served: ServedEngine | None = Field(
        default=None, exclude=True, repr=False, description="The engine; LangChain hands it on to copies it configures."
    )

    @model_validator(mode="before")
    @classmethod
    def _of_no_service(cls, given: Any) -> Any:
        """Leave out what chat models of LangChain have in common to reach a service, and say so."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None or name not in CALL_SETTINGS}
        meaningless = [name for name in SERVICE_SETTINGS if given.get(name) is not None]
        if meaningless:
            warn_caller(f"{' and '.join(meaningless)}: no effect on a model in this process")
        return {name: value for name, value in given.items() if name not in SERVICE_SETTINGS}

    def model_post_init(self, context: Any) -> None:
        """Prepare to load the model when it is first needed."""
        super().model_post_init(context)
        self.served = self.served or ServedEngine.loading(self._loaded_by)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Load the model again, by name, in the process that unpickles; an engine that was given is not there."""
        super().__setstate__(state)
        if self.served is None or not self.served.given:
            self.served = ServedEngine.loading(self._loaded_by)

    @property
    def _loaded_by(self) -> dict[str, Any]:
        return {name.removesuffix("_name"): getattr(self, name) for name in LOAD_SETTINGS}

    @property
    def _serving(self) -> ServedEngine:
        """What answers.

        Raises:
            MisplacedSetting: if what the engine was loaded by has been changed since, in this or in a copy.
        """
        settings = self._loaded_by
        self.served = self.served.fitting(settings) if self.served is not None else ServedEngine.loading(settings)
        return self.served

    @classmethod
    def from_engine(cls, engine: FusionEngine, **options: Any) -> ChatQCFuse:
        """Wrap an engine that is already loaded; its method and prompt template are used.

        Raises:
            MisplacedSetting: if an option is one by which engines are loaded, such as `method`.
        """
        chat = cls(model=engine.lm.name, served=ServedEngine.of(engine, options=options), **options)
        assert chat.served is not None
        chat.served.loaded_by = chat._loaded_by
        return chat

    @property
    def engine(self) -> FusionEngine:
        """The engine; the model is loaded on first use."""
        return self._serving.engine

    def close(self) -> None:
        """Cancel what is being answered and free the model, unless the engine was given."""
        if self.served is not None:
            self.served.close()

    @property
    def _llm_type(self) -> str:
        return "qcfuse"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # Everything that changes an answer: LangChain's own cache of answers is keyed by it.
        settings = self.model_dump(include=set(ANSWER_SETTINGS))
        if self.served is None or not self.served.given:
            return settings
        engine = self.engine
        about = {"fingerprint": engine.lm.fingerprint.digest, "template": repr(engine.prompts.template)}
        return {**settings, **about, "method": repr(engine.method)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "qcfuse"
        params["ls_model_name"] = kwargs.get("model", self.model_name)
        return params

    def warm(
        self,
        documents: Iterable[Document],
        *,
        source_key: str | None = SOURCE_KEY,
        replace: bool = False,
        access_key: str | None = None,
    ) -> WarmSummary:
        """Prefill documents into the store; those that are there cost nothing.

        The store notes what each is from, so that `engine.forget(source)` removes it again. With `QCFuseVectorStore`
        there is nothing to warm by hand.

        Args:
            documents: as a retriever will return them.
            source_key: metadata key that says what a document is from; its id where it does not, nothing where it has
                none. None: always the id, as in `QCFuseVectorStore`.
            replace: the documents are all there is of their sources: what those had besides is removed, unless another
                source has it.
            access_key: metadata key that says who may read a document's source, so that no cache of a passage remembers
                what its readers may not see; sources without it are as they were, new ones everybody's. None: nothing
                is said of that.
        """
        given = list(documents)
        texts, sources = [d.page_content for d in given], [source_of(d, source_key) for d in given]
        access = access_of(given, sources, access_key)
        return self.engine.warm(texts, sources=sources, replace=replace, access=access)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools, in the words of the model's own chat template; one that has none for tools says so when asked.

        Args:
            tools: functions, models, tools or their schemas.
            tool_choice: `auto` or None as the model likes, `any` for one of them, or a tool's name. What must be called
                is called rightly, by its schema; that needs `qcfuse-rag[structured]`.
            **kwargs: of the calls.
        """
        given = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=given, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Have answers that are objects of a schema.

        Args:
            schema: a pydantic class, a typed dictionary or a JSON schema.
            include_raw: return `raw`, `parsed` and `parsing_error` rather than raise.
            method: `json_schema` tells the model the schema and lets it write nothing else, which any model can;
                `function_calling` does so by a tool of that shape, if its chat template knows tools; `json_mode` lets
                it write any object, so tell it which. All need `qcfuse-rag[structured]`.
            **kwargs: of the calls.
        """
        if method == "function_calling":
            return called(self, schema, include_raw=include_raw, options=kwargs)
        return structured(self, schema, include_raw=include_raw, any_object=method == "json_mode", options=kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own token ids of a text."""
        return list(self.engine.prompts.encode_whole(RenderedText(text), begin=False)[0])

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return how many tokens the prompt of a conversation has, as the model's chat template writes it."""
        if not messages:
            return 0
        prompts, offered = self.engine.prompts, [convert_to_openai_tool(tool) for tool in tools or ()]
        try:
            rendered = prompts.render([turn_of(message) for message in messages], offered)
        except InvalidTemplate:  # such as one that does not begin with a user's: a part of a conversation is counted
            return super().get_num_tokens_from_messages(messages)
        return len(prompts.encode_whole(rendered, begin=False)[0])

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = self._serving.ask(self._request(messages, stop, kwargs))
        try:
            return self._result(answer.result(), kwargs)
        finally:
            answer.cancel()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = await self._serving.ask_aside(self._request(messages, stop, kwargs))
        return self._result(await answer.aresult(), kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        answer = self._serving.ask(self._request(messages, stop, kwargs))
        reader = self._reader(kwargs)
        try:
            for piece in answer:
                text = reader.push(piece)
                if text:
                    chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
                    if run_manager is not None:
                        run_manager.on_llm_new_token(text, chunk=chunk)
                    yield chunk
        finally:
            answer.cancel()
        last = self._last(answer, reader)
        if run_manager is not None:
            run_manager.on_llm_new_token(last.text, chunk=last)
        yield last

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        answer = await self._serving.ask_aside(self._request(messages, stop, kwargs))
        reader = self._reader(kwargs)
        try:
            async for piece in answer:
                text = reader.push(piece)
                if text:
                    chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(text, chunk=chunk)
                    yield chunk
        finally:
            answer.cancel()
        last = self._last(answer, reader)
        if run_manager is not None:
            await run_manager.on_llm_new_token(last.text, chunk=last)
        yield last

    def _request(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> AnswerRequest:
        """Return what makes the prompt and says how to choose tokens."""
        warn_unused(kwargs, CALL_SETTINGS)
        documents: Sequence[Document] | None = kwargs.get("documents")
        ends = stop or self.stop or ()
        form = form_of(kwargs)
        sampling = SamplingParams(
            max_new_tokens=_or(kwargs.get("max_tokens"), self.max_tokens),
            temperature=_or(kwargs.get("temperature"), self.temperature),
            top_p=_or(kwargs.get("top_p"), self.top_p),
            stop=(ends,) if isinstance(ends, str) else tuple(ends),
            seed=_or(kwargs.get("seed"), self.seed),
        )
        if not messages:
            raise ValueError("there is nothing to answer: give at least one message")
        turns = [turn_of(message) for message in messages]
        passages = [text for message in messages for text in documents_in(message)]
        passages += texts_of(documents or ())
        about = None if documents is None and not passages else passages

        def request(engine: FusionEngine) -> tuple[Prompt, SamplingParams]:
            settings = form.sampling(sampling, engine.lm.tokenizer)
            return form.prompt(engine, turns, about), settings

        return request

    def _reader(self, kwargs: dict[str, Any]) -> ResponseReader:
        """Return what takes the answer apart; the model is loaded by now."""
        return ResponseReader(self.engine.lm.tokenizer, form_of(kwargs))

    def _result(self, generation: Generation, kwargs: dict[str, Any]) -> ChatResult:
        _, reply = self._reader(kwargs).finish(generation)
        message = answer_message(reply, generation, self._metadata(generation))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last(self, answer: ScheduledAnswer, reader: ResponseReader) -> ChatGenerationChunk:
        """Return the end of a stream."""
        assert answer.generation is not None
        rest, reply = reader.finish(answer.generation)
        message = last_chunk(rest, reply, answer.generation, self._metadata(answer.generation))
        return ChatGenerationChunk(message=message)

    def _metadata(self, generation: Generation) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "finish_reason": generation.finish_reason,
            "fusion": generation.report.to_dict(),
        }


def _or(value: Any, usual: Any) -> Any:
    """Return a call's setting; None, which configurations often hold, stands for the usual one."""
    return usual if value is None else value


def form_of(kwargs: dict[str, Any]) -> ResponseFormat:
    """Return what form a call's keyword arguments give its answer."""
    return ResponseFormat(kwargs.get("tools") or (), kwargs.get("tool_choice"), kwargs.get("response_format"))
