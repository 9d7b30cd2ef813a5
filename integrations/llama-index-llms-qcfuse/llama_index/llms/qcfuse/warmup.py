"""Warm nodes while they are ingested."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, model_validator
from llama_index.core.schema import BaseNode, TransformComponent

from llama_index.llms.qcfuse.base import QCFuseLLM
from llama_index.llms.qcfuse.nodes import access_of, passage_of, source_of
from llama_index.llms.qcfuse.settings import without_class_name
from qcfuse_rag import WarmSummary
from qcfuse_rag.generation.caller_warnings import warn_not_stored
from qcfuse_rag.store.prefill_base import BASES


class QCFuseWarmup(TransformComponent):
    """Prefills every node that passes through an `IngestionPipeline` into the store of the LLM.

    Put it after the splitter; the nodes pass through unchanged. What is warmed is what the model will be shown,
    `node.get_content(MetadataMode.LLM)`. Nodes that are in the store already cost nothing.

    A document, known by its nodes' `ref_doc_id`, has the passages of this call from now on and no others: when it comes
    again changed, passages it lost leave the store, unless another document has them. So all nodes of a document must
    come in one call, as they do from a splitter, and its id must stay the same (`SimpleDirectoryReader` has
    `filename_as_id=True` for that). Documents that do not come are left alone; deletions never come here, see
    `QCFuseVectorStore` and `forget_missing`.
    """

    model_config = ConfigDict(extra="forbid")
    _of_dict = model_validator(mode="before")(without_class_name)

    llm: QCFuseLLM = Field(description="The LLM that will answer.", exclude=True)
    bases: list[str] | None = Field(
        default=None, description="How to store nodes; None: as the LLM's method reads them."
    )
    access_key: str | None = Field(
        default=None,
        description="Metadata key that says who may read a document, so that no cache of a passage remembers what its "
        "readers may not see; documents without it are as they were, new ones everybody's. None: nothing is said.",
    )
    fingerprint: str = Field(
        default="", description="Changes with what is stored, so that the pipeline's own cache lets nodes pass again."
    )

    _progress: Callable[[int, int], None] | None = PrivateAttr(default=None)
    _summary: WarmSummary | None = PrivateAttr(default=None)
    _held: tuple[object, ...] = PrivateAttr(default=())

    def __init__(self, llm: QCFuseLLM, progress: Callable[[int, int], None] | None = None, **data: Any) -> None:
        super().__init__(llm=llm, **data)
        self._progress = progress
        self._renew()

    def __getstate__(self) -> dict[str, Any]:
        """Return what `IngestionPipeline(num_workers=...)` hands to other processes, which load the LLM by its name.

        Raises:
            TypeError: if the LLM was made of an engine or has no folder to store in: nothing would be left of what
                other processes warm.
        """
        if not self.llm.portable:
            raise TypeError(
                "to warm in other processes, as with num_workers, make the LLM of model=... and store=FOLDER, which "
                "every process opens for itself"
            )
        return super().__getstate__()

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
        embeddings = [node.embedding for node in nodes if node.embedding is not None]
        self._summary = self.llm.engine.warm(
            [passage_of(node) for node in nodes],
            sources=[source_of(node) for node in nodes],
            bases=[BASES[name] for name in self.bases] if self.bases else None,
            vectors=np.array(embeddings, np.float32) if embeddings and len(embeddings) == len(nodes) else None,
            access=access_of(nodes, self.access_key),
            progress=self._progress,
        )
        warn_not_stored(self._summary)
        self._renew()
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes on a worker thread and return them."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the transform as data, by which a pipeline knows whether it has seen nodes pass through it.

        A pipeline skips what it has seen, and would skip a document that was forgotten meanwhile, or changed and
        changed back. So the data are other data once the store has lost or got passages, and in another process.
        """
        self._renew()
        return super().to_dict(**kwargs)

    def _renew(self) -> None:
        engine = self.llm.engine
        own = [tier for tier in engine.store.tiers if not tier.kind.startswith("remote")][-1]
        [now] = own.stats()
        held = (engine.sources.version, now.entries, now.size_bytes, now.evicted, now.discarded)
        if held != self._held:
            self._held, self.fingerprint = held, uuid.uuid4().hex
