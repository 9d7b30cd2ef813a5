"""A chat model in this process whose prefill reuses stored documents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, model_validator

from langchain_qcfuse.messages import (
    SOURCE_KEY,
    answer_chunk,
    answer_message,
    documents_in,
    last_chunk,
    passage_of,
    texts_of,
    turn_of,
)
from langchain_qcfuse.structured import bind_json_schema, bind_schema_tool
from qcfuse_rag import FusionEngine, Generation, Prompt, SamplingParams, WarmSummary
from qcfuse_rag.errors import InvalidTemplate, PromptTooLong
from qcfuse_rag.integrations import (
    FINISH_REASONS,
    LOAD_SETTINGS,
    SAMPLING_SETTINGS,
    AnswerRequest,
    EngineHandle,
    EngineSettings,
    ParsedResponse,
    ReasoningFormat,
    RequestHandle,
    ResponseReader,
    can_call_tools,
    response_format_of,
    warm_passages,
    warn_caller,
    warn_unused,
)
from qcfuse_rag.prompts.chat_template import RenderedText

SERVICE_SETTINGS = ("api_key", "base_url", "timeout", "max_retries", "streaming")
SHARED_SETTINGS = ("max_tokens", *SAMPLING_SETTINGS, "stop", "logprobs", "top_logprobs")
CALL_SETTINGS = (
    *SHARED_SETTINGS,
    "chat_template_kwargs",
    "documents",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "stream",
)
"""Keyword arguments of a call; LangChain itself reads `stream`."""


def without_service_settings(values: Any) -> Any:
    """Drop settings that LangChain's chat models use to reach a service, with a warning."""
    if not isinstance(values, dict):
        return values
    values = {name: value for name, value in values.items() if value is not None or name not in CALL_SETTINGS}
    ignored = [name for name in SERVICE_SETTINGS if values.get(name) is not None]
    if ignored:
        warn_caller(f"{' and '.join(ignored)}: no effect on a model in this process")
    return {name: value for name, value in values.items() if name not in SERVICE_SETTINGS}


class ContextOverflow(PromptTooLong, ContextOverflowError):
    """A prompt that exceeds the context window, as LangChain's middleware and fallbacks know it."""


@contextmanager
def overflows_as_langchains() -> Iterator[None]:
    """Raise LangChain's error for a prompt that is too long."""
    try:
        yield
    except PromptTooLong as error:
        raise ContextOverflow(str(error)) from error


class ProfileOfModel:
    """A mixin with a chat model's profile, as a property: the field of the base class would load the model at once."""

    @property
    def profile(self) -> ModelProfile | None:
        """The model's abilities and limits; the user's own profile if one is given.

        `max_input_tokens` leaves room for an answer of `max_tokens` in the context window. LangChain's agents read
        here that answers can follow a schema, and middleware when a conversation is to be summarised.
        """
        if given := self.__dict__.get("profile"):
            return dict(given)  # type: ignore[return-value]
        lm, max_tokens = self.engine.lm, self.max_tokens  # type: ignore[attr-defined]
        return ModelProfile(
            max_input_tokens=max(1, lm.context_window.tokens - max_tokens),
            max_output_tokens=max_tokens,
            text_inputs=True,
            text_outputs=True,
            tool_calling=can_call_tools(lm.tokenizer),
            tool_choice=can_call_tools(lm.tokenizer),
            structured_output=find_spec("llguidance") is not None,
            reasoning_output=ReasoningFormat.of(lm.tokenizer) is not None,
        )


class ChatQCFuse(EngineSettings, ProfileOfModel, BaseChatModel):
    """A transformers model in this process, run by qcfuse-rag's engine.

    Warmed documents are found in the text of messages and not prefilled again. Documents in the keyword argument
    `documents`, or in `text-plain` blocks of messages, need not be found: the RAG prompt puts them before the text of
    the last user message.

    One thread answers all calls, from any number of threads and event loops. It prefills short prompts
    first and long ones in parts, and decodes answers together.

    Example:
        ```python
        from langchain_qcfuse import ChatQCFuse

        chat = ChatQCFuse(model="HuggingFaceTB/SmolLM2-135M-Instruct", store="kv")
        chat.warm(documents)
        print(chat.invoke("Who keeps the key?", documents=documents).content)
        ```
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid")
    _of_no_service = model_validator(mode="before")(without_service_settings)

    MODEL: ClassVar[str] = "model_name"
    HANDLE: ClassVar[str] = "served"

    model_name: str = Field(alias="model", description="Hugging Face id, local folder or GGUF file.")
    max_tokens: int = Field(default=256, description="Most tokens to generate.", gt=0)
    stop: list[str] | None = Field(default=None, description="Strings that end an answer.")

    served: EngineHandle | None = Field(
        default=None, exclude=True, repr=False, description="The engine; LangChain passes it to configured copies."
    )

    @model_validator(mode="after")
    def _set_model_profile(self) -> Self:
        if self.__dict__["profile"] is type(self).profile:  # none was given: pydantic takes the property for a default
            self.__dict__["profile"] = None
        return self

    @model_validator(mode="after")
    def _check_profile_keys(self) -> Self:
        return self  # the base class's would load the model

    @property
    def _llm_type(self) -> str:
        return "qcfuse"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # Everything that changes an answer: the key of LangChain's own cache of answers.
        settings = self.model_dump(include={"model_name", *LOAD_SETTINGS, *SHARED_SETTINGS})
        if self.served is None or not self.served.wrapped:
            return settings
        engine = self.engine
        return {
            **settings,
            "fingerprint": engine.lm.fingerprint.digest,
            "template": repr(engine.prompts.template),
            "method": repr(engine.method),
        }

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
        show_progress: bool | None = None,
    ) -> WarmSummary:
        """Prefill documents into the store; documents that are already stored cost nothing.

        The store notes the source of each document, so that `engine.forget(source)` removes it again.
        `QCFuseVectorStore` warms by itself.

        Args:
            documents: as a retriever will return them.
            source_key: metadata key of a document's source. Without that key the id is the source; without an id there
                is none. None: always the id, as in `QCFuseVectorStore`.
            replace: the documents are all that their sources have. Earlier passages of these sources are removed,
                unless another source has them.
            access_key: metadata key of the tag that says who may read a document's source. No cache of a passage then
                depends on text that its readers may not see. A source without the key keeps its tag; a new source
                without it is open to everybody. None: no tags are set.
            show_progress: whether to show a bar of the tokens; None: in a terminal.
        """
        passages = [passage_of(document, source_key) for document in documents]
        return warm_passages(self.engine, passages, access_key=access_key, show_progress=show_progress, replace=replace)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools as the model's own chat template shows them; calls raise if the template shows none.

        Args:
            tools: functions, models, tools or their schemas.
            tool_choice: `auto` or None: the model decides; `any`: one of the tools is called; or the name of a tool.
                The arguments of a required call follow the tool's schema, which needs `qcfuse-rag[structured]`.
            **kwargs: keyword arguments of the calls.
        """
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return a runnable whose answers are objects of a schema. Needs `qcfuse-rag[structured]`.

        Args:
            schema: a pydantic class, a typed dictionary or a JSON schema.
            include_raw: return `raw`, `parsed` and `parsing_error` instead of raising.
            method: `json_schema` puts the schema into the prompt and allows no other text, with any model;
                `function_calling` does the same with a tool of that schema, if the chat template shows tools;
                `json_mode` allows any JSON object, so describe it in the prompt.
            **kwargs: keyword arguments of the calls.
        """
        if method == "function_calling":
            return bind_schema_tool(self, schema, include_raw=include_raw, options=kwargs)
        any_object = method == "json_mode"
        return bind_json_schema(self, schema, include_raw=include_raw, any_object=any_object, options=kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text by the model's own tokenizer."""
        return list(self.engine.prompts.tokens.encode_whole(RenderedText(text), begin=False)[0])

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return the number of prompt tokens of a conversation under the model's chat template."""
        if not messages:
            return 0
        prompts, schemas = self.engine.prompts, [convert_to_openai_tool(tool) for tool in tools or ()]
        try:
            rendered = prompts.render([turn_of(message) for message in messages], schemas)
        except InvalidTemplate:  # a part of a conversation, such as one that does not begin with a user's message
            return super().get_num_tokens_from_messages(messages)
        return len(prompts.tokens.encode_whole(rendered, begin=False)[0])

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with overflows_as_langchains():
            answer = self._current_handle().submit(self._request(messages, stop, kwargs))
        try:
            answer.result()
        finally:
            answer.cancel()
        return self._result(answer, kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with overflows_as_langchains():
            answer = await self._current_handle().asubmit(self._request(messages, stop, kwargs))
        await answer.aresult()
        return self._result(answer, kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with overflows_as_langchains():
            answer = self._current_handle().submit(self._request(messages, stop, kwargs))
        reader = self._reader(answer, kwargs)
        try:
            for piece in answer:
                if any(read := reader.push(piece)):
                    yield ChatGenerationChunk(message=answer_chunk(read))
        finally:
            answer.cancel()
        yield self._last(answer, reader)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with overflows_as_langchains():
            answer = await self._current_handle().asubmit(self._request(messages, stop, kwargs))
        reader = self._reader(answer, kwargs)
        try:
            async for piece in answer:
                if any(read := reader.push(piece)):
                    yield ChatGenerationChunk(message=answer_chunk(read))
        finally:
            answer.cancel()
        yield self._last(answer, reader)

    def _request(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> AnswerRequest:
        """Return a function that builds the prompt and the sampling settings once the engine is loaded."""
        warn_unused(kwargs, CALL_SETTINGS)
        documents: Sequence[Document] | None = kwargs.get("documents")
        template_kwargs: dict[str, Any] | None = kwargs.get("chat_template_kwargs")
        response_format = response_format_of(kwargs)
        limit = self.max_tokens if kwargs.get("max_tokens") is None else kwargs["max_tokens"]
        sampling = self.sampling_params(kwargs, max_new_tokens=limit, stop=stop or self.stop or ())
        if not messages:
            raise ValueError("there is nothing to answer: give at least one message")
        turns = [turn_of(message) for message in messages]
        texts = [text for message in messages for text in documents_in(message)] + texts_of(documents or ())
        passages = None if documents is None and not texts else texts

        def request(engine: FusionEngine) -> tuple[Prompt, SamplingParams]:
            settings = response_format.sampling(sampling, engine.lm.tokenizer)
            prompt = engine.chat_prompt(turns, response_format, passages, chat_template_kwargs=template_kwargs)
            return prompt, settings

        return request

    def _result(self, answer: RequestHandle, kwargs: dict[str, Any]) -> ChatResult:
        assert answer.generation is not None
        _, reply = self._reader(answer, kwargs).finish(answer.generation)
        message = answer_message(reply, answer.generation, self._metadata(answer.generation, reply))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last(self, answer: RequestHandle, reader: ResponseReader) -> ChatGenerationChunk:
        assert answer.generation is not None
        rest, reply = reader.finish(answer.generation)
        message = last_chunk(rest, reply, answer.generation, self._metadata(answer.generation, reply))
        return ChatGenerationChunk(message=message)

    def _metadata(self, generation: Generation, reply: ParsedResponse) -> dict[str, Any]:
        """Return what is known of an answer; `finish_reason` is in OpenAI's words, `ended_by` in this library's."""
        content = generation.content_logprobs(self.engine.lm.tokenizer)
        return {
            **({} if content is None else {"logprobs": {"content": content, "refusal": None}}),
            "model_name": self.model_name,
            "finish_reason": "tool_calls" if reply.calls else FINISH_REASONS[generation.finish_reason],
            "ended_by": generation.finish_reason,
            "fusion": generation.report.to_dict(),
            "verified_upto": generation.verified_upto,
        }
