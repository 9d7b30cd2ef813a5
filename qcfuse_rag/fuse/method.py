"""A method: a base, a probe, a selector and a budget, put together under a published name."""

from __future__ import annotations

from dataclasses import dataclass, field

from qcfuse_rag.fuse.budget import FixedRatio
from qcfuse_rag.fuse.probe import QuestionProbe
from qcfuse_rag.fuse.select import Nothing, Selector
from qcfuse_rag.ingest.base import Base


@dataclass(frozen=True, slots=True)
class Method:
    """What to reuse and what to recompute.

    Attributes:
        name: as in the method table.
        base: which stored caches chunks start from; None reuses nothing, which is full prefill.
        probe: how tokens are scored with the question in view; None for methods that do not look at it.
        selector: how scores become rows.
        budget: how many of the reused tokens are recomputed; None leaves the number to the selector.
    """

    name: str
    base: Base | None
    probe: QuestionProbe | None = None
    selector: Selector = field(default_factory=Nothing)
    budget: FixedRatio | None = field(default_factory=lambda: FixedRatio(0.0))

    @property
    def ratio(self) -> float | None:
        """The budget as a fraction; 1 for full prefill, None if the selector decides."""
        if self.base is None:
            return 1.0
        return None if self.budget is None else self.budget.ratio
