"""A method: parts put together under a published name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from qcfuse_rag.fusion.adapters import Adapter, ReadsBases
from qcfuse_rag.fusion.budgets import Budget, FixedRatio
from qcfuse_rag.fusion.guard import Guard
from qcfuse_rag.fusion.probes import Probe
from qcfuse_rag.fusion.selectors import Selection, SelectNone, Selector
from qcfuse_rag.fusion.state import FusedPrompt, PlacedChunk
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.layer_hooks import LayerHook
from qcfuse_rag.store.prefill_base import Base


class LayerHookFactory(Protocol):
    """What a method does between the layers of the fused pass."""

    def steer(
        self,
        fused: FusedPrompt,
        candidates: list[PlacedChunk],
        selection: Selection,
        scores: Scores | None,
        budget: int,
    ) -> LayerHook:
        """Return what steers one pass.

        Args:
            fused: the prompt with its stored chunks placed.
            candidates: placed chunks that are not exact.
            selection: the reused tokens the pass begins with.
            scores: from the method's probe, if it has one.
            budget: how many reused tokens the method may recompute.
        """
        ...


@dataclass(frozen=True, slots=True)
class Method:
    """What to reuse and what to recompute.

    Attributes:
        name: as in the method table.
        base: which stored caches chunks start from; None reuses nothing, which is full prefill.
        adapter: what becomes of a stored chunk before it is placed; None leaves it as it is.
        probe: how tokens are scored; None for methods that do not look.
        selector: how scores become rows.
        budget: how many of the reused tokens are recomputed; None leaves the number to the selector.
        layerwise: what changes from layer to layer while rows are computed; None for nothing.
        context: what recomputed tokens see of the reused ones: `all`, or those `selected` with them.
        guard: when to compute everything instead; None for never.
    """

    name: str
    base: Base | None
    adapter: Adapter | None = None
    probe: Probe | None = None
    selector: Selector = field(default_factory=SelectNone)
    budget: Budget | None = field(default_factory=lambda: FixedRatio(0.0))
    layer_hook: LayerHookFactory | None = None
    context: Literal["all", "selected"] = "all"
    guard: Guard | None = None

    @property
    def bases(self) -> tuple[Base, ...]:
        """Every base that chunks may be read under, the method's own first."""
        others = self.adapter.bases if isinstance(self.adapter, ReadsBases) else ()
        return () if self.base is None else tuple(dict.fromkeys((self.base, *others)))

    @property
    def unguarded(self) -> Method:
        """The method without its guard: it always fuses."""
        return replace(self, guard=None)

    @property
    def as_full_prefill(self) -> Method:
        """Full prefill under the method's name."""
        return Method(self.name, base=None)

    @property
    def ratio(self) -> float | None:
        """The budget as a fraction; 1 for full prefill, None if the selector decides."""
        if self.base is None:
            return 1.0
        return None if self.budget is None else self.budget.ratio
