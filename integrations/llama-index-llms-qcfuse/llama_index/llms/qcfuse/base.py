"""An LLM in this process whose prefill reuses stored passages."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
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
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import BaseTool
from llama_index.core.types import PydanticProgramMode

from llama_index.llms.qcfuse.events import finish
from llama_index.llms.qcfuse.messages import (
    INVALID_CALLS_KEY,
    answer_message,
    broken_text,
    completion_response,
    logprobs_of,
    reasoning_kwargs,
    turn_of,
)
from qcfuse_rag import FusionEngine, Generation, Prompt, SamplingParams
from qcfuse_rag.integrations import (
    SAMPLING_SETTINGS,
    AnswerRequest,
    Delta,
    EngineHandle,
    EngineSettings,
    ParsedResponse,
    RequestHandle,
    ResponseReader,
    can_call_tools,
    response_format_of,
    warn_unused,
)
from qcfuse_rag.prompts.template import Turn

CALL_SETTINGS = (
    "max_new_tokens",
    *SAMPLING_SETTINGS,
    "logprobs",
    "top_logprobs",
    "stop",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "chat_template_kwargs",
)


def without_class_name(values: Any) -> Any:
    """Return an object's settings without the class name that LlamaIndex adds when it serialises the object."""
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if name != "class_name"}


class PreparedMessages(list[ChatMessage]):
    """Messages of a prompt that `build` makes, not from their text; callbacks and events show the messages."""

    def __init__(self, messages: Iterable[ChatMessage], build: Callable[[FusionEngine], Prompt]) -> None:
        super().__init__(messages)
        self.build = build


Conversation = PreparedMessages | Sequence[Turn] | str
"""The question of a call: a prepared prompt, turns of the chat template, or finished text."""


def following_schema(predict: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `structured_predict` of LlamaIndex whose answers can only follow the schema.

    llguidance enforces it; if it is not installed, the schema is in the prompt alone.
    """

    @wraps(predict)
    def predict_by_schema(
        self: FunctionCallingLLM,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        if self.pydantic_program_mode is PydanticProgramMode.LLM and find_spec("llguidance") is not None:
            schema = {"name": output_cls.__name__, "schema": output_cls.model_json_schema()}
            llm_kwargs = {"response_format": {"type": "json_schema", "json_schema": schema}, **(llm_kwargs or {})}
        return predict(self, output_cls, prompt, llm_kwargs, **prompt_args)

    return predict_by_schema


class QCFuseLLM(EngineSettings, FunctionCallingLLM):
    """A transformers model in this process, run by qcfuse-rag's engine.

    Warmed nodes are found in LlamaIndex's prompts and not prefilled again. All other text is prefilled as usual.
    `QCFuseSynthesizer` passes each node separately instead, so nodes need not be found.

    One thread answers all calls, from any number of threads and event loops. It prefills short prompts
    first and long ones in parts, and decodes answers together.

    Agents can call tools if the model's own chat template shows them. The arguments of a required call follow the
    tool's schema, which needs `qcfuse-rag[structured]`.

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
    pydantic_program_mode: PydanticProgramMode = Field(
        default=PydanticProgramMode.LLM, description="How objects are written: LLM: as text, which any model can."
    )

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
            is_function_calling_model=can_call_tools(self.engine.lm.tokenizer),
            model_name=self.model,
        )

    def sampling(self, **kwargs: Any) -> SamplingParams:
        """Return the sampling settings; keyword arguments of one call replace the fields."""
        limit = self.max_new_tokens if kwargs.get("max_new_tokens") is None else kwargs["max_new_tokens"]
        return self.sampling_params(kwargs, max_new_tokens=limit, stop=kwargs.get("stop") or self.stop)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, as a user turn of the chat template unless `formatted`."""
        return completion_response(self.answer(self._text(prompt, formatted, kwargs), kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Complete a text piece by piece."""
        pieces = self._pieces(self._text(prompt, formatted, kwargs), kwargs)
        return (completion_response(piece) for piece in pieces)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return self.answer(self._chat(messages, kwargs), kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece."""
        return self._pieces(self._chat(messages, kwargs), kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text without blocking the event loop."""
        return completion_response(await self.aanswer(self._text(prompt, formatted, kwargs), kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Complete a text piece by piece without blocking the event loop."""
        pieces = self._apieces(self._text(prompt, formatted, kwargs), kwargs)
        return (completion_response(piece) async for piece in pieces)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation without blocking the event loop."""
        return await self.aanswer(self._chat(messages, kwargs), kwargs)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation piece by piece without blocking the event loop."""
        return self._apieces(self._chat(messages, kwargs), kwargs)

    structured_predict = following_schema(FunctionCallingLLM.structured_predict)
    astructured_predict = following_schema(FunctionCallingLLM.astructured_predict)
    stream_structured_predict = following_schema(FunctionCallingLLM.stream_structured_predict)
    astream_structured_predict = following_schema(FunctionCallingLLM.astream_structured_predict)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls of tools in an answer.

        Raises:
            ValueError: if there is none, and `error_on_no_tool_call`.
        """
        calls = [
            ToolSelection(tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=block.tool_kwargs)
            for block in response.message.blocks
            if isinstance(block, ToolCallBlock)
        ]
        if not calls and error_on_no_tool_call:
            reasons = response.additional_kwargs.get(INVALID_CALLS_KEY) or ["it is text"]
            raise ValueError(f"the answer calls no tool: {'; '.join(reasons)}: {response.message.content!r}")
        return calls

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        asked = [ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg] if user_msg else []
        return {
            "messages": [*(chat_history or []), *asked],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice or ("required" if tool_required else None),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def answer(self, request: AnswerRequest, kwargs: dict[str, Any]) -> ChatResponse:
        """Answer a prompt, and report its prefill to LlamaIndex's instrumentation."""
        answer = self._current_handle().submit(request)
        try:
            answer.result()
        finally:
            finish(answer)
        return self._whole(answer, kwargs)

    async def aanswer(self, request: AnswerRequest, kwargs: dict[str, Any]) -> ChatResponse:
        """Answer a prompt like `answer` without blocking the event loop; cancelling the task cancels the request."""
        answer = await self._current_handle().asubmit(request)
        try:
            await answer.aresult()
        finally:
            finish(answer)
        return self._whole(answer, kwargs)

    def _request(
        self, conversation: Conversation, kwargs: dict[str, Any], *, plain: str | None = None
    ) -> AnswerRequest:
        """Check the settings of a call, and return a function that builds its prompt once the engine is loaded.

        `plain` is completed instead of the conversation if the model has no chat template.
        """
        warn_unused(kwargs, CALL_SETTINGS)
        sampling, response_format = self.sampling(**kwargs), response_format_of(kwargs)
        tools = response_format.visible_tools
        if tools and isinstance(conversation, PreparedMessages | str):
            raise ValueError("the model's chat template shows tools, so give messages, and no `messages_to_prompt`")

        def build(engine: FusionEngine) -> tuple[Prompt, SamplingParams]:
            tokenizer = engine.lm.tokenizer
            if isinstance(conversation, PreparedMessages):
                prompt = conversation.build(engine)
            else:
                text = conversation if plain is None or tokenizer.chat_template is not None else plain
                prompt = engine.prompt_from_text(text, tools, chat_template_kwargs=kwargs.get("chat_template_kwargs"))
            return prompt, response_format.sampling(sampling, tokenizer)

        return build

    def _text(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> AnswerRequest:
        if formatted:
            return self._request(prompt, kwargs)
        if self.completion_to_prompt is not default_completion_to_prompt:
            return self._request(self.completion_to_prompt(prompt), kwargs)
        return self._request([("user", prompt)], kwargs, plain=prompt)

    def _chat(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> AnswerRequest:
        if isinstance(messages, PreparedMessages):
            return self._request(messages, kwargs)
        if self.messages_to_prompt is not messages_to_prompt:
            return self._request(self.messages_to_prompt(messages), kwargs)
        return self._request([turn_of(message) for message in messages], kwargs)

    def _pieces(self, request: AnswerRequest, kwargs: dict[str, Any]) -> ChatResponseGen:
        answer, so_far = self._current_handle().submit(request), Delta()
        reader = self._reader(answer, kwargs)
        try:
            for text in answer:
                if any(piece := reader.push(text)):
                    so_far = Delta(*map(operator.add, so_far, piece))
                    yield _grown(so_far, piece)
        finally:
            finish(answer)
        yield from self._ends(answer, so_far, reader)

    async def _apieces(self, request: AnswerRequest, kwargs: dict[str, Any]) -> ChatResponseAsyncGen:
        answer, so_far = await self._current_handle().asubmit(request), Delta()
        reader = self._reader(answer, kwargs)
        try:
            async for text in answer:
                if any(piece := reader.push(text)):
                    so_far = Delta(*map(operator.add, so_far, piece))
                    yield _grown(so_far, piece)
        finally:
            finish(answer)
        for end in self._ends(answer, so_far, reader):
            yield end

    def _ends(self, answer: RequestHandle, so_far: Delta, reader: ResponseReader) -> Iterator[ChatResponse]:
        """Yield the last piece of a stream, and the whole answer."""
        assert answer.generation is not None
        rest, parsed = reader.finish(answer.generation)
        piece = Delta(rest.text + broken_text(parsed), rest.reasoning)
        yield _grown(Delta(*map(operator.add, so_far, piece)), piece)
        yield self._response(answer.generation, parsed).model_copy(update={"delta": ""})

    def _whole(self, answer: RequestHandle, kwargs: dict[str, Any]) -> ChatResponse:
        assert answer.generation is not None
        return self._response(answer.generation, self._reader(answer, kwargs).finish(answer.generation)[1])

    def _response(self, generation: Generation, parsed: ParsedResponse) -> ChatResponse:
        """Return a finished answer with its token counts."""
        usage = generation.usage
        counts = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
        }
        invalid = {INVALID_CALLS_KEY: [call.reason for call in parsed.broken]} if parsed.broken else {}
        return ChatResponse(
            message=answer_message(parsed),
            raw=generation.to_dict(),
            logprobs=logprobs_of(generation, self.engine.lm.tokenizer),
            additional_kwargs={**counts, **reasoning_kwargs(parsed.reasoning), **invalid},
        )


def _grown(so_far: Delta, piece: Delta) -> ChatResponse:
    message = answer_message(ParsedResponse(so_far.text, reasoning=so_far.reasoning))
    extra = reasoning_kwargs(so_far.reasoning, piece.reasoning)
    return ChatResponse(message=message, delta=piece.text, additional_kwargs=extra)
