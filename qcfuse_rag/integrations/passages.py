"""Store the passages of a framework's documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.ingestion.summary import WarmSummary
from qcfuse_rag.store.documents.acl import tags_of


@dataclass(frozen=True, slots=True)
class Passage:
    """A framework's document or node, as the model is shown it; its metadata may say who may read the document."""

    text: str
    source: str | None
    metadata: Mapping[str, Any]


def warm_passages(
    engine: FusionEngine, passages: Iterable[Passage], *, access_key: str | None = None, **options: Any
) -> WarmSummary:
    """Prefill passages into the engine's store and note their sources.

    Args:
        engine: the engine.
        passages: the passages.
        access_key: metadata key with the access tag of a passage's document, see `tags_of`; None sets no tags.
        **options: other arguments of `FusionEngine.warm`.

    Raises:
        ValueError: if passages of one source have different tags.
    """
    passages = list(passages)
    sources = [passage.source for passage in passages]
    tags = tags_of(((passage.source, passage.metadata) for passage in passages), access_key)
    return engine.warm([passage.text for passage in passages], sources=sources, access=tags, **options)
