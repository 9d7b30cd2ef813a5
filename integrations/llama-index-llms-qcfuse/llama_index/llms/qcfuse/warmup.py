"""A transform that warms nodes while they are ingested."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator
from llama_index.core.schema import BaseNode, TransformComponent

from llama_index.llms.qcfuse.base import QCFuseLLM, without_class_name
from llama_index.llms.qcfuse.nodes import passage_of, warn_of_windows
from qcfuse_rag import WarmSummary
from qcfuse_rag.integrations import warm_passages, warn_not_stored
from qcfuse_rag.methods import find_base, unknown_base


class QCFuseWarmup(TransformComponent):
    """Prefills every node that passes through an `IngestionPipeline` into the store of the LLM.

    Put it after the splitter; the nodes pass through unchanged. It warms the text that the model will be shown,
    `node.get_content(MetadataMode.LLM)`. Nodes that are already stored cost nothing. In a terminal it shows a bar of
    the tokens.

    A document, identified by its nodes' `ref_doc_id`, keeps only the passages of its latest call. When it comes again
    changed, its lost passages are removed from the store, unless another document has them. So all nodes of a document
    must come in one call, as they do from a splitter, and its id must stay the same (`SimpleDirectoryReader` has
    `filename_as_id=True` for that). Other documents are left alone. Deletions never reach this transform; see
    `QCFuseVectorStore` and `forget_missing`.
    """

    model_config = ConfigDict(extra="forbid")
    _from_dict = model_validator(mode="before")(without_class_name)

    llm: QCFuseLLM = Field(description="The LLM that will answer.", exclude=True)
    bases: list[str] | None = Field(
        default=None, description="How to store nodes; None: as the LLM's method reads them."
    )
    access_key: str | None = Field(
        default=None,
        description="Metadata key of the tag that says who may read a document. No cache of a passage then depends on "
        "text that its readers may not see. A document without the key keeps its tag; a new document without it is "
        "open to everybody. None: no tags are set.",
    )
    target_metadata_key: str | None = Field(
        default=None,
        description="Metadata key of the text to warm in place of a node's own, the one that "
        "MetadataReplacementPostProcessor has: `window` after a SentenceWindowNodeParser. Windows overlap, "
        "so they take several times the bytes of the text.",
    )
    show_progress: bool | None = Field(default=None, description="Whether to show a bar; None: in a terminal.")
    fingerprint: str = Field(
        default="",
        description="Changes with the store's content, so that the pipeline's own cache does not skip nodes.",
    )

    @field_validator("bases")
    @classmethod
    def _known(cls, bases: list[str] | None) -> list[str] | None:
        if reason := unknown_base(bases or ()):
            raise ValueError(reason)
        return bases

    _progress: Callable[[int, int], None] | None = PrivateAttr(default=None)
    _summary: WarmSummary | None = PrivateAttr(default=None)
    _store_state: tuple[object, ...] = PrivateAttr(default=())

    def __init__(self, llm: QCFuseLLM, progress: Callable[[int, int], None] | None = None, **data: Any) -> None:
        super().__init__(llm=llm, **data)
        self._progress = progress
        self._update_fingerprint()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that `IngestionPipeline(num_workers=...)` sends to other processes.

        These load the LLM by its model's name.

        Raises:
            TypeError: if the LLM comes from an engine or stores in memory: caches that other processes warm would be
                lost.
        """
        if not self.llm.portable:
            raise TypeError(
                "to warm in other processes, as with num_workers, create the LLM with model=... and store=FOLDER, "
                "which every process opens for itself"
            )
        return super().__getstate__()

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name in LlamaIndex."""
        return "QCFuseWarmup"

    @property
    def summary(self) -> WarmSummary | None:
        """The summary of the last run; None before the first."""
        return self._summary

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes and return them."""
        warn_of_windows(nodes, self.target_metadata_key)
        embeddings = [node.embedding for node in nodes if node.embedding is not None]
        self._summary = warm_passages(
            self.llm.engine,
            [passage_of(node, self.target_metadata_key) for node in nodes],
            access_key=self.access_key,
            bases=[find_base(name) for name in self.bases] if self.bases else None,
            vectors=np.array(embeddings, np.float32) if embeddings and len(embeddings) == len(nodes) else None,
            progress=self._progress,
            show_progress=self.show_progress,
        )
        warn_not_stored(self._summary)
        self._update_fingerprint()
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes on a worker thread and return them."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the transform as data, from which a pipeline makes the key of its own cache.

        A pipeline skips nodes whose key it has seen. It would skip a document that was forgotten meanwhile, or changed
        and changed back. So the data change when the store loses or gets passages, and differ in another process.
        """
        self._update_fingerprint()
        return super().to_dict(**kwargs)

    def _update_fingerprint(self) -> None:
        engine = self.llm.engine
        local_tier = [tier for tier in engine.store.tiers if not tier.kind.startswith("remote")][-1]
        [stats] = local_tier.stats()
        version = engine.corpus.open_sources().manifest.version()
        state = (version, stats.entries, stats.size_bytes, stats.evicted, stats.discarded)
        if state != self._store_state:
            self._store_state, self.fingerprint = state, uuid.uuid4().hex
