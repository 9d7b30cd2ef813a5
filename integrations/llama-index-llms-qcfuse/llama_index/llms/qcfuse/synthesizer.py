"""Answer over nodes whose caches are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.types import RESPONSE_TEXT_TYPE

from llama_index.llms.qcfuse.base import QCFuseLLM
from llama_index.llms.qcfuse.events import FusionEndEvent
from llama_index.llms.qcfuse.streams import in_thread
from qcfuse_rag import TextStream

dispatcher = get_dispatcher(__name__)


class QCFuseSynthesizer(BaseSynthesizer):
    """Puts the retrieved nodes into one prompt, each as a segment of its own, and answers.

    Other synthesizers join nodes into one text, strip and split it again, and the boundaries that stored caches need
    are gone. Here a node's text stays what it was when it was warmed. A node that was not warmed is prefilled with
    the question.

    Args:
        llm: the LLM, whose `rag_messages` word the prompt.
        streaming: answer piece by piece.
        **kwargs: of `BaseSynthesizer`, except `output_cls` and `multimodal`.

    Raises:
        ValueError: for what it cannot do.
    """

    def __init__(self, llm: QCFuseLLM, streaming: bool = False, **kwargs: Any) -> None:
        refused = [name for name in ("output_cls", "multimodal") if kwargs.get(name)]
        if refused:
            raise ValueError(f"QCFuseSynthesizer answers in text only; leave out {', '.join(refused)}")
        super().__init__(llm=llm, streaming=streaming, **kwargs)
        self._qcfuse = llm

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer a question over the texts of nodes, in their order."""
        stream = self._open(query_str, text_chunks, response_kwargs)
        return (piece for piece in stream) if self._streaming else stream.result().text

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer without blocking the event loop."""
        stream = await asyncio.to_thread(self._open, query_str, text_chunks, response_kwargs)
        if self._streaming:
            return in_thread(stream)  # type: ignore[return-value]
        return (await asyncio.to_thread(stream.result)).text

    def _open(self, question: str, passages: Sequence[str], kwargs: dict[str, Any]) -> TextStream:
        engine = self._qcfuse.engine
        stream = engine.stream(engine.prompt(question, passages), self._qcfuse.sampling(**kwargs))
        dispatcher.event(FusionEndEvent(report=stream.report.to_dict()))
        return stream

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ValueError(
                "the wording of the prompt is part of what is stored: give QCFuseLLM other `rag_messages` and warm anew"
            )
