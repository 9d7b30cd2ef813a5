"""The preparation of a method before questions come, and its cost, which TTFT does not show."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.configurations import Configuration
from qcfuse_rag.bundled import default_embedder
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.ingestion.similarity import nearest_chunks
from qcfuse_rag.methods.captures.job import capture
from qcfuse_rag.methods.fusionrag import NEIGHBOURS
from qcfuse_rag.store.key import FRAMED, Base

CAPTURED = {"cachecraft": "variant", "kamera": "patch", "kvcomm": "difference"}  # captured caches, by their reader
CAPTURED_TOGETHER = 4  # passages in a captured group


@dataclass(frozen=True, slots=True)
class OfflineCost:
    """The cost of one preparation; methods that share a preparation read the same stored caches.

    `chunks` are the distinct passages prepared now; passages found in the store cost nothing.
    """

    preparation: str
    chunks: int
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prefill every passage under one base, and capture caches if a kind to `keep` is named, see `Corpus.capture`.

    Where no captured cache fits, caches of the base are placed. Hashable, so that methods can share it.
    """

    base: Base
    keep: str | None = None

    @property
    def name(self) -> str:
        """Its name in results."""
        return f"warm {self.base.name}" if self.keep is None else f"capture {self.keep}, warm {self.base.name}"

    @property
    def prerequisite(self) -> Preparation | None:
        """The preparation that this one builds on, or None; its cost is added.

        Enriched caches are made from framed caches; the first passage of a prompt is read framed instead of primed.
        """
        if self.keep is not None:
            return Preparation(self.base)
        return Preparation(FRAMED) if self.base.derived or self.base.primed else None

    def run(self, engine: FusionEngine, passages: Sequence[str]) -> OfflineCost:
        """Prefill the passages that the store lacks, or capture each behind its neighbours."""
        if self.keep is not None:
            return self._capture(engine, passages, self.keep)
        neighbours = embedded_neighbours(passages) if self.base.derived else None
        started = time.perf_counter()
        summary = engine.warm(passages, bases=(self.base,), neighbours=neighbours)
        return OfflineCost(self.name, summary.warmed, time.perf_counter() - started, summary.size_bytes)

    def _capture(self, engine: FusionEngine, passages: Sequence[str], keep: str) -> OfflineCost:
        """Compute groups of related passages exactly, by the embedding index; questions play no part."""
        groups = covering_groups(embedded_neighbours(passages), CAPTURED_TOGETHER)
        started = time.perf_counter()
        texts = [[passages[i] for i in group] for group in groups]
        summary = capture(engine.corpus.entry_writer(), texts, keep=(keep,))
        seconds, failed = time.perf_counter() - started, {index for index, _ in summary.failed}
        # A passage in several groups is captured in each of them, but is one prepared passage.
        behind = {i for index, group in enumerate(groups) if index not in failed for i in group[1:]}
        return OfflineCost(self.name, min(len(behind), summary.captured), seconds, summary.size_bytes)


def embedded_neighbours(passages: Sequence[str]) -> list[list[int]]:
    """Return for each passage its nearest neighbours by MiniLM; an index has the embeddings in any case."""
    from qcfuse_rag.library.embedder import Embedder

    return nearest_chunks(Embedder(default_embedder())(passages), NEIGHBOURS)


def preparation_of(configuration: Configuration) -> Preparation | None:
    """Return the preparation that a configuration needs; None for full prefill."""
    method = configuration.method
    return None if method.base is None else Preparation(method.base, CAPTURED.get(method.name))


def depends_on_neighbours(configuration: Configuration) -> bool:
    """Return whether a configuration's caches depend on the passages that are prepared beside them."""
    needed = preparation_of(configuration)
    return needed is not None and (needed.keep is not None or needed.base.derived)


def prepare(
    engine: FusionEngine, configurations: Iterable[Configuration], passages: Iterable[str]
) -> dict[str, OfflineCost]:
    """Do the preparations that the configurations need, each once, and return their costs by name.

    Repeated passages count once. Neighbours are searched among the passages.
    """
    texts = list(dict.fromkeys(passages))
    costs: dict[str, OfflineCost] = {}

    def run(preparation: Preparation) -> OfflineCost:
        if preparation.name not in costs:
            before = run(preparation.prerequisite) if preparation.prerequisite is not None else None
            cost = preparation.run(engine, texts)
            if before is not None:
                seconds, size_bytes = cost.seconds + before.seconds, cost.size_bytes + before.size_bytes
                cost = replace(cost, seconds=seconds, size_bytes=size_bytes)
            costs[preparation.name] = cost
        return costs[preparation.name]

    needed = dict.fromkeys(preparation_of(configuration) for configuration in configurations)
    return {preparation.name: run(preparation) for preparation in needed if preparation is not None}


def covering_groups(neighbours: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Return groups of related chunks in which every chunk follows others at least once.

    These are the groups to capture before any retrieval is known. A chunk that no group contains yet is the last of a
    new group of at most `size`, behind its nearest neighbours.
    """
    groups: list[list[int]] = []
    covered: set[int] = set()
    for chunk, related in enumerate(neighbours):
        if chunk not in covered and related:
            groups.append([*related[: size - 1], chunk])
            covered.update(groups[-1][1:])
    return groups
