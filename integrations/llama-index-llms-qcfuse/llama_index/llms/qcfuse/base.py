"""A local LLM whose prefill reuses stored passages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

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
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM

from llama_index.llms.qcfuse.streams import in_thread
from qcfuse_rag import FusionEngine, Generation, Prompt, PromptTemplate, SamplingParams, TextStream, choose_method


class QCFuseLLM(CustomLLM):
    """A transformers model in this process, with qcfuse-rag's engine around it.

    Used in a query engine together with `QCFuseSynthesizer`, which hands nodes over one by one. Called directly it is
    a local LLM like any other: a prompt without known passages is prefilled in full.

    Example:
        ```python
        from llama_index.llms.qcfuse import QCFuseLLM

        llm = QCFuseLLM(model="HuggingFaceTB/SmolLM2-135M-Instruct", store="kv")
        print(llm.complete("Name a colour."))
        ```
    """

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
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")
    device: str | None = Field(default=None, description="Such as cpu or cuda:0; a GPU if there is one.")
    dtype: str | None = Field(default=None, description="Such as bfloat16; float32 on a CPU.")

    _engine: FusionEngine | None = PrivateAttr(default=None)
    _loading: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name in LlamaIndex."""
        return "QCFuseLLM"

    @classmethod
    def from_engine(cls, engine: FusionEngine, **options: Any) -> QCFuseLLM:
        """Wrap an engine that is already loaded; its method and prompt template are used."""
        llm = cls(model=engine.lm.name, **options)
        llm._engine = engine
        return llm

    @property
    def engine(self) -> FusionEngine:
        """The engine; the model is loaded on first use."""
        with self._loading:
            if self._engine is None:
                self._engine = FusionEngine.load(
                    self.model,
                    store=self.store,
                    template=PromptTemplate(messages=tuple(self.rag_messages)) if self.rag_messages else None,
                    method=choose_method(self.method, ratio=self.ratio, base=self.base),
                    device=self.device,
                    dtype=self.dtype,
                )
            return self._engine

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
            "stop": tuple(self.stop),
            **{name: kwargs[name] for name in ("max_new_tokens", "temperature", "top_p", "seed") if name in kwargs},
        }
        if kwargs.get("stop"):
            options["stop"] = (kwargs["stop"],) if isinstance(kwargs["stop"], str) else tuple(kwargs["stop"])
        return SamplingParams(**options)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text; unless `formatted`, as a user's turn of the chat template."""
        return self._completion(self._open(self._text(prompt, formatted), kwargs).result())

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Complete a text piece by piece."""
        return self._completions(self._open(self._text(prompt, formatted), kwargs))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return self._chat(self._completion(self._open(self._conversation(messages), kwargs).result()))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece."""
        pieces = self._completions(self._open(self._conversation(messages), kwargs))
        return (self._chat(piece) for piece in pieces)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text without blocking the event loop."""
        return await asyncio.to_thread(
            lambda: self._completion(self._open(self._text(prompt, formatted), kwargs).result())
        )

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Complete a text piece by piece without blocking the event loop."""
        stream = await asyncio.to_thread(lambda: self._open(self._text(prompt, formatted), kwargs))
        return in_thread(iter(self._completions(stream)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation without blocking the event loop."""
        return await asyncio.to_thread(
            lambda: self._chat(self._completion(self._open(self._conversation(messages), kwargs).result()))
        )

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a conversation piece by piece without blocking the event loop."""
        stream = await asyncio.to_thread(lambda: self._open(self._conversation(messages), kwargs))
        return in_thread(self._chat(piece) for piece in self._completions(stream))

    def _text(self, prompt: str, formatted: bool) -> Prompt:
        as_turn = not formatted and self.engine.lm.tokenizer.chat_template is not None
        return self.engine.plain([("user", prompt)] if as_turn else prompt)

    def _conversation(self, messages: Sequence[ChatMessage]) -> Prompt:
        return self.engine.plain([(message.role.value, message.content or "") for message in messages])

    def _open(self, prompt: Prompt, kwargs: dict[str, Any]) -> TextStream:
        return self.engine.stream(prompt, self.sampling(**kwargs))

    def _completions(self, stream: TextStream) -> CompletionResponseGen:
        text = ""
        for piece in stream:
            text += piece
            yield CompletionResponse(text=text, delta=piece)
        assert stream.generation is not None
        final = self._completion(stream.generation)
        yield CompletionResponse(text=text, delta="", raw=final.raw, additional_kwargs=final.additional_kwargs)

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
