"""A response synthesizer for nodes whose caches are stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.types import RESPONSE_TEXT_TYPE

from llama_index.llms.qcfuse.base import PromptFactory, QCFuseLLM
from qcfuse_rag import FusionEngine


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

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer a question over the texts of nodes, in their order."""
        build = self._prompt(query_str, text_chunks, response_kwargs)
        if self._streaming:
            return self._pieces(build, response_kwargs)
        return self._qcfuse.answer(build, response_kwargs).text

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer without blocking the event loop."""
        build = self._prompt(query_str, text_chunks, response_kwargs)
        if self._streaming:
            return self._apieces(build, response_kwargs)  # type: ignore[return-value]
        return (await self._qcfuse.aanswer(build, response_kwargs)).text

    def _prompt(self, question: str, passages: Sequence[str], kwargs: dict[str, Any]) -> PromptFactory:
        system_prompt = self._qcfuse.system_prompt
        history = [("system", system_prompt)] if system_prompt else []
        return partial(
            FusionEngine.prompt,
            question=question,
            passages=passages,
            history=history,
            chat_template_kwargs=kwargs.get("chat_template_kwargs"),
        )

    def _pieces(self, build: PromptFactory, kwargs: dict[str, Any]) -> Iterator[str]:
        for piece in self._qcfuse.read(self._qcfuse.ask(build, kwargs), kwargs):
            if piece.text:
                yield piece.text

    async def _apieces(self, build: PromptFactory, kwargs: dict[str, Any]) -> AsyncIterator[str]:
        async with aclosing(self._qcfuse.aread(await self._qcfuse.aask(build, kwargs), kwargs)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ValueError(
                "stored caches depend on the wording of the prompt: give QCFuseLLM other `rag_messages` and warm again"
            )
