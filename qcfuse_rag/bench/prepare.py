"""What has to be done before questions come, and what it costs: the part of a method that TTFT does not show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qcfuse_rag.bench.configurations import Configuration
from qcfuse_rag.engine import FusionEngine
from qcfuse_rag.ingest.base import Base


@dataclass(frozen=True, slots=True)
class OfflineCost:
    """The offline part of one preparation.

    Attributes:
        preparation: its name; methods that share one read the same stored caches.
        chunks: passages it prepared now; those found in the store cost nothing.
        seconds: how long it took.
        size_bytes: bytes it stored.
    """

    preparation: str
    chunks: int
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Warming:
    """The usual preparation: every passage is prefilled under one base. Hashable, so that it is done once for all."""

    base: Base

    @property
    def name(self) -> str:
        """What it is called in results."""
        return f"warm {self.base.name}"

    def run(self, engine: FusionEngine, passages: Sequence[str]) -> OfflineCost:
        """Prefill what the store does not have yet."""
        summary = engine.warm(passages, bases=(self.base,))
        return OfflineCost(self.name, summary.warmed, summary.elapsed_s, summary.size_bytes)


def preparation_of(configuration: Configuration) -> Warming | None:
    """Return what a configuration needs beforehand; None for full prefill.

    A method whose offline part is more than warming is given its own preparation here: anything hashable with `name`
    and `run`.
    """
    base = configuration.method.base
    return None if base is None else Warming(base)


def prepare(
    engine: FusionEngine, configurations: Iterable[Configuration], passages: Iterable[str]
) -> dict[str, OfflineCost]:
    """Do what the configurations need, once for those that need the same.

    Args:
        engine: whose store is filled.
        configurations: what will be run.
        passages: texts; repetitions count once.

    Returns:
        Name of a preparation -> its cost.
    """
    texts = list(dict.fromkeys(passages))
    needed = dict.fromkeys(preparation_of(one) for one in configurations)
    return {one.name: one.run(engine, texts) for one in needed if one is not None}
