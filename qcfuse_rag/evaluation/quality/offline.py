"""What has to be done before questions come, and what it costs: the part of a method that TTFT does not show."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.evaluation.quality.configurations import Configuration
from qcfuse_rag.ingestion.enrichment import NEIGHBOURS
from qcfuse_rag.ingestion.neighbours import covering_groups, nearest_chunks
from qcfuse_rag.store.prefill_base import FRAMED, Base

CAPTURED = {"cachecraft": "variant", "kamera": "patch", "kvcomm": "difference"}
"""Methods that read what was captured, and what that is."""

CAPTURED_TOGETHER = 4
"""Passages of a captured group."""


@dataclass(frozen=True, slots=True)
class OfflineCost:
    """The offline part of one preparation.

    Attributes:
        preparation: its name; methods that share one read the same stored caches.
        chunks: distinct passages it prepared now; those found in the store cost nothing.
        seconds: how long it took.
        size_bytes: bytes it stored.
    """

    preparation: str
    chunks: int
    seconds: float
    size_bytes: int

    def after(self, before: OfflineCost) -> OfflineCost:
        """Return the cost of this preparation together with that of the one it builds on, for the same passages."""
        seconds, size_bytes = self.seconds + before.seconds, self.size_bytes + before.size_bytes
        return OfflineCost(self.preparation, self.chunks, seconds, size_bytes)


@dataclass(frozen=True, slots=True)
class NeighbourPool:
    """Where enriched passages' neighbours are searched.

    Attributes:
        texts: a corpus; those that are prepared belong to it in any case.
        neighbours: how many to take of each.
    """

    texts: tuple[str, ...] = ()
    neighbours: int = NEIGHBOURS

    def beside(self, passages: Sequence[str]) -> list[str]:
        """Return the corpus without the passages that are prepared, each text once."""
        own = set(passages)
        return [text for text in dict.fromkeys(self.texts) if text not in own]


@dataclass(frozen=True, slots=True)
class WarmPreparation:
    """The usual preparation: every passage is prefilled under one base. Hashable, so that it is done once for all."""

    base: Base

    @property
    def name(self) -> str:
        """What it is called in results."""
        return f"warm {self.base.name}"

    @property
    def first(self) -> WarmPreparation | None:
        """What has to be there before, and is paid for too.

        Enriched passages are made from framed ones; a prompt's first passage is taken framed instead of primed.
        """
        return WarmPreparation(FRAMED) if self.base.enriched or self.base.primed else None

    def run(self, engine: FusionEngine, passages: Sequence[str], pool: NeighbourPool) -> OfflineCost:
        """Prefill what the store does not have yet."""
        others = pool.beside(passages) if self.base.enriched else []
        neighbours = embedded_neighbours([*passages, *others], pool.neighbours) if self.base.enriched else None
        started = time.perf_counter()
        summary = engine.warm(
            passages, bases=(self.base,), neighbours=neighbours and neighbours[: len(passages)], others=others
        )
        return OfflineCost(self.name, summary.warmed, time.perf_counter() - started, summary.size_bytes)


@dataclass(frozen=True, slots=True)
class CapturePreparation:
    """Groups of related passages are computed exactly, and what was born behind others is kept.

    Attributes:
        keep: `variant`, `difference` or `patch`, see `FusionEngine.capture`.
        base: what is placed where nothing captured fits.
    """

    keep: str
    base: Base

    @property
    def name(self) -> str:
        """What it is called in results."""
        return f"capture {self.keep}, warm {self.base.name}"

    @property
    def first(self) -> WarmPreparation:
        """What has to be there before, and is paid for too."""
        return WarmPreparation(self.base)

    def run(self, engine: FusionEngine, passages: Sequence[str], pool: NeighbourPool) -> OfflineCost:
        """Capture every passage behind others of the embedding index; nothing is known of the questions."""
        groups = covering_groups(embedded_neighbours(passages), CAPTURED_TOGETHER)
        started = time.perf_counter()
        summary = engine.corpus.capture([[passages[i] for i in group] for group in groups], keep=(self.keep,))
        seconds, failed = time.perf_counter() - started, {index for index, _ in summary.failed}
        # A passage in several groups is captured in each: more entries, but what is paid for is one passage.
        behind = {i for index, group in enumerate(groups) if index not in failed for i in group[1:]}
        return OfflineCost(self.name, min(len(behind), summary.captured), seconds, summary.size_bytes)


Preparation = WarmPreparation | CapturePreparation


def embedded_neighbours(passages: Sequence[str], count: int = NEIGHBOURS) -> list[list[int]]:
    """Return for each passage the nearest of the others by MiniLM, as FusionRAG takes them from the index.

    The index has the embeddings anyway, so they are not charged.

    Raises:
        QCFuseError: if there is no embedding model.
    """
    from qcfuse_rag.bundled import default_embedder

    try:
        from qcfuse_rag.retrieval.embedder import Embedder
    except ImportError as error:
        raise QCFuseError(
            "enriched passages need an embedding model to find their neighbours; run `pip install 'qcfuse-rag[cli]'`"
        ) from error

    return nearest_chunks(Embedder(default_embedder())(passages), count)


def preparation_of(configuration: Configuration) -> Preparation | None:
    """Return what a configuration needs beforehand; None for full prefill."""
    method = configuration.method
    if method.base is None:
        return None
    if method.name in CAPTURED:
        return CapturePreparation(CAPTURED[method.name], method.base)
    return WarmPreparation(method.base)


def neighbour_preparation(configuration: Configuration) -> str | None:
    """Return which warming counts all passages that a configuration's caches depend on; None if each stands alone."""
    needed = preparation_of(configuration)
    if isinstance(needed, CapturePreparation):
        return needed.first.name
    return needed.name if needed is not None and needed.base.enriched else None


def prepare(
    engine: FusionEngine,
    configurations: Iterable[Configuration],
    passages: Iterable[str],
    pool: NeighbourPool | None = None,
) -> dict[str, OfflineCost]:
    """Do what the configurations need, once for those that need the same.

    Args:
        engine: whose store is filled.
        configurations: what will be run.
        passages: texts; repetitions count once.
        pool: where neighbours are searched; among the passages if None.

    Returns:
        Name of a preparation -> its cost.
    """
    texts = list(dict.fromkeys(passages))
    costs: dict[str, OfflineCost] = {}

    def run(one: Preparation) -> OfflineCost:
        if one.name not in costs:
            before = run(one.first) if one.first is not None else None
            own = one.run(engine, texts, pool or NeighbourPool())
            costs[one.name] = own if before is None else own.after(before)
        return costs[one.name]

    needed = dict.fromkeys(preparation_of(one) for one in configurations)
    return {one.name: run(one) for one in needed if one is not None}
