"""Answer over nodes whose caches are stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.types import RESPONSE_TEXT_TYPE

from llama_index.llms.qcfuse.base import Build, QCFuseLLM, over
from qcfuse_rag import FusionEngine


class QCFuseSynthesizer(BaseSynthesizer):
    """Puts the retrieved nodes into one prompt, each as a segment of its own, and answers.

    Other synthesizers join nodes into one text, strip and split it again; what was warmed is found there, but for its
    edges and nodes that were split. Here a node stays what it was when it was warmed, and the wording of the prompt is
    the one it was warmed for. A node that was not warmed is prefilled with the question.

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
        build = self._prompt(query_str, text_chunks)
        if self._streaming:
            return self._pieces(build, response_kwargs)
        return self._qcfuse.answer(build, response_kwargs).text

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer without blocking the event loop."""
        build = self._prompt(query_str, text_chunks)
        if self._streaming:
            return self._apieces(build, response_kwargs)  # type: ignore[return-value]
        return (await self._qcfuse.aanswer(build, response_kwargs)).text

    def _prompt(self, question: str, passages: Sequence[str]) -> Build:
        told = self._qcfuse.system_prompt
        history = [("system", told)] if told else []
        return partial(FusionEngine.prompt, question=question, passages=passages, history=history)

    def _pieces(self, build: Build, kwargs: dict[str, Any]) -> Iterator[str]:
        answer = self._qcfuse.ask(build, kwargs)
        try:
            yield from answer
        finally:
            over(answer)

    async def _apieces(self, build: Build, kwargs: dict[str, Any]) -> AsyncIterator[str]:
        answer = await self._qcfuse.aask(build, kwargs)
        try:
            async for piece in answer:
                yield piece
        finally:
            over(answer)

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ValueError(
                "the wording of the prompt is part of what is stored: give QCFuseLLM other `rag_messages` and warm anew"
            )
