"""Warm nodes while they are ingested."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent

from llama_index.llms.qcfuse.base import QCFuseLLM
from qcfuse_rag import BASES, WarmSummary


class QCFuseWarmup(TransformComponent):
    """Prefills every node that passes through an `IngestionPipeline` into the store of the LLM.

    Put it after the splitter; the nodes pass through unchanged. What is warmed is what the model will be shown,
    `node.get_content(MetadataMode.LLM)`. Nodes that are in the store already cost nothing.
    """

    llm: QCFuseLLM = Field(description="The LLM that will answer.", exclude=True)
    bases: list[str] | None = Field(
        default=None, description="How to store nodes; None: as the LLM's method reads them."
    )
    fingerprint: str = Field(
        default="", description="What is stored and where; makes the pipeline's own cache warm again after a change."
    )

    _progress: Callable[[int, int], None] | None = PrivateAttr(default=None)
    _summary: WarmSummary | None = PrivateAttr(default=None)

    def __init__(self, llm: QCFuseLLM, progress: Callable[[int, int], None] | None = None, **data: Any) -> None:
        super().__init__(llm=llm, **data)
        self._progress = progress
        engine = llm.engine
        base = engine.method.base.name if engine.method.base else ""
        parts = (engine.lm.fingerprint.digest, engine.prompts.frame, engine.prompts.template.chunk, base, llm.store)
        self.fingerprint = hashlib.sha256(repr(parts).encode()).hexdigest()

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name in LlamaIndex."""
        return "QCFuseWarmup"

    @property
    def summary(self) -> WarmSummary | None:
        """What the last run did."""
        return self._summary

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes and return them."""
        texts = [node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes]
        chosen = [BASES[name] for name in self.bases] if self.bases else None
        self._summary = self.llm.engine.warm(texts, bases=chosen, progress=self._progress)
        return nodes
