"""Store the passages of a framework's documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.ingestion.warm_job import Progress, WarmSummary
from qcfuse_rag.store.documents.sources import tags_of


@dataclass(frozen=True, slots=True)
class Passage:
    """A framework's document or node, as the model is shown it; its metadata may say who may read the document."""

    text: str
    source: str | None
    metadata: Mapping[str, Any]


def warm_passages(
    engine: FusionEngine,
    passages: Iterable[Passage],
    *,
    access_key: str | None = None,
    show_progress: bool | None = None,
    **options: Any,
) -> WarmSummary:
    """Prefill passages into the engine's store and note their sources.

    Args:
        engine: the engine.
        passages: the passages.
        access_key: metadata key with the access tag of a passage's document, see `tags_of`; None sets no tags.
        show_progress: whether to show a bar of the tokens; None: in a terminal, unless `options` has `progress`.
        **options: other arguments of `FusionEngine.warm`.

    Raises:
        ValueError: if passages of one source have different tags.
    """
    passages = list(passages)
    texts, sources = [passage.text for passage in passages], [passage.source for passage in passages]
    tags = tags_of(((passage.source, passage.metadata) for passage in passages), access_key)
    if options.get("progress") is not None:
        return engine.warm(texts, sources=sources, access=tags, **options)
    with _bar(show_progress) as progress:
        return engine.warm(texts, sources=sources, access=tags, **{**options, "progress": progress})


@contextmanager
def _bar(show: bool | None) -> Iterator[Progress]:
    """Yield what advances a bar on standard error; the bar appears with the first batch."""
    bars: list[Any] = []

    def advance(done: int, total: int) -> None:
        if not bars:
            disable = None if show is None else not show
            bars.append(tqdm(total=total, desc="warming passages", unit=" tokens", disable=disable))
        bars[0].update(done - bars[0].n)

    try:
        yield advance
    finally:
        for bar in bars:
            bar.close()
