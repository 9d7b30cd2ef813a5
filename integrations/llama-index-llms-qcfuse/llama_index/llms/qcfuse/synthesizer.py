"""A response synthesizer for nodes whose caches are stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.types import RESPONSE_TEXT_TYPE

from llama_index.llms.qcfuse.base import PreparedMessages, QCFuseLLM
from qcfuse_rag import FusionEngine, PromptTemplate

dispatcher = get_dispatcher(__name__)


class QCFuseSynthesizer(BaseSynthesizer):
    """Puts the retrieved nodes into one prompt, each as a separate segment, and answers.

    Other synthesizers join nodes into one text, strip it and split it again. Warmed nodes are found in that text,
    except their edges and nodes that were split. Here a node's text and the wording of the prompt are exactly those it
    was warmed for. A node that was not warmed is prefilled with the question.

    Args:
        llm: the LLM, whose `rag_messages` word the prompt.
        streaming: answer piece by piece.
        **kwargs: arguments of `BaseSynthesizer`, except `output_cls` and `multimodal`.

    Raises:
        ValueError: if `output_cls` or `multimodal` is given.
    """

    def __init__(self, llm: QCFuseLLM, streaming: bool = False, **kwargs: Any) -> None:
        refused = [name for name in ("output_cls", "multimodal") if kwargs.get(name)]
        if refused:
            raise ValueError(f"QCFuseSynthesizer answers in text only; leave out {', '.join(refused)}")
        super().__init__(llm=llm, streaming=streaming, **kwargs)
        self._qcfuse = llm

    @dispatcher.span
    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer a question over the texts of nodes, in their order."""
        messages = self._messages(query_str, text_chunks, response_kwargs)
        if self._streaming:
            return self._pieces(messages, response_kwargs)
        return self._qcfuse.chat(messages, **response_kwargs).message.content or ""

    @dispatcher.span
    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer without blocking the event loop."""
        messages = self._messages(query_str, text_chunks, response_kwargs)
        if self._streaming:
            return self._apieces(messages, response_kwargs)  # type: ignore[return-value]
        return (await self._qcfuse.achat(messages, **response_kwargs)).message.content or ""

    def _messages(self, question: str, passages: Sequence[str], kwargs: dict[str, Any]) -> PreparedMessages:
        """Return the messages for callbacks and events, and how the prompt of separate passages is built."""
        system_prompt, wording = self._qcfuse.system_prompt, PromptTemplate()
        history = [("system", system_prompt)] if system_prompt else []
        context = "".join(map(wording.format_chunk, passages))
        turns = [
            (role, text.format(context=context, question=question))
            for role, text in self._qcfuse.rag_messages or wording.messages
        ]
        build = partial(
            FusionEngine.prompt,
            question=question,
            passages=passages,
            history=history,
            chat_template_kwargs=kwargs.get("chat_template_kwargs"),
        )
        return PreparedMessages((ChatMessage(role=role, content=text) for role, text in [*history, *turns]), build)

    def _pieces(self, messages: PreparedMessages, kwargs: dict[str, Any]) -> Iterator[str]:
        for response in self._qcfuse.stream_chat(messages, **kwargs):
            if response.delta:
                yield response.delta

    async def _apieces(self, messages: PreparedMessages, kwargs: dict[str, Any]) -> AsyncIterator[str]:
        async with aclosing(await self._qcfuse.astream_chat(messages, **kwargs)) as responses:
            async for response in responses:
                if response.delta:
                    yield response.delta

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ValueError(
                "stored caches depend on the wording of the prompt: give QCFuseLLM other `rag_messages` and warm again"
            )
