"""A method: a base, probe, selector, budget, guard and further parts under a published name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from qcfuse_rag.fusion.probes import Probe
from qcfuse_rag.fusion.selectors import Selection, SelectNone, Selector, candidate_positions
from qcfuse_rag.fusion.state import Adapter, FusedPrompt, PlacedChunk
from qcfuse_rag.runtime.attention.scores import Scores
from qcfuse_rag.runtime.cost import Costs, PrefillEstimate
from qcfuse_rag.runtime.layer_hooks import LayerHook
from qcfuse_rag.runtime.residuals import ResidualKernel
from qcfuse_rag.store.key import Base


@dataclass(frozen=True, slots=True, eq=False)
class PassStart:
    """The state of a prompt before its fused pass.

    Attributes:
        candidates: placed chunks that are not exact.
        selection: the reused tokens the pass begins with.
        budget: most reused tokens to recompute.
    """

    fused: FusedPrompt
    candidates: list[PlacedChunk]
    selection: Selection
    scores: Scores | None
    budget: int

    @property
    def positions(self) -> Tensor:
        """`[N]` int64, the positions of all tokens of the candidates, on the model's device."""
        return candidate_positions(self.candidates, self.fused.lm.device)


class LayerHookFactory(Protocol):
    """Makes the hook that acts between the layers of one fused pass."""

    def make_hook(self, start: PassStart) -> LayerHook:
        """Return the hook of one pass."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """How a method chooses tokens to recompute, in plain words.

    Attributes:
        reason: why it chose a token; completes the sentence "They were recomputed because ...".
        score: the quantity that a token's score measures; None for methods without scores.
    """

    reason: str
    score: str | None = None


ATTENTION = "attention of the question"
BY_ATTENTION = Choice("the question pays them more attention than the other tokens of the passages", ATTENTION)


IN_FULL = "computed in full"
"""The beginning of a guard's reason."""


class Guard(Protocol):
    """Decides whether a prompt is computed in full instead of fused."""

    def refusal(self, estimate: PrefillEstimate, costs: Costs) -> str | None:
        """Return why a prompt is not to be fused, or None if it is."""
        ...


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Fuse only where that is predicted to be faster than full prefill.

    Short prompts, a slow store, a prompt of which little is stored and a ratio near 1 are computed in full, which is
    also exact.

    Attributes:
        margin: fuse if the predicted time is below this share of full prefill's; predictions are not exact.
    """

    margin: float = 0.9

    def __post_init__(self) -> None:
        if self.margin <= 0:
            raise ValueError(f"margin must be above 0, got {self.margin}")

    def refusal(self, estimate: PrefillEstimate, costs: Costs) -> str | None:
        """Compare the predicted times."""
        full_s = costs.full_pass_s(estimate.prompt_tokens, estimate.held_tokens)
        fused_s = costs.fused_s(estimate)
        if fused_s < self.margin * full_s:
            return None
        saved = f"less than {1 - self.margin:.0%} would be saved" if fused_s < full_s else "nothing would be saved"
        return f"{IN_FULL}, {saved}: predicted to take {full_s:.3g} s, fused {fused_s:.3g} s"


class Budget(Protocol):
    """The number of reused passage tokens to recompute."""

    @property
    def ratio(self) -> float:
        """The budget as a fraction in [0, 1]."""
        ...

    def tokens(self, reused_tokens: int) -> int:
        """Return the number of `reused_tokens` to recompute."""
        ...


@dataclass(frozen=True, slots=True)
class FixedRatio:
    """A fixed share of the reused passage tokens.

    Attributes:
        ratio: fraction in [0, 1].
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be a fraction in [0, 1], got {self.ratio}")

    def tokens(self, reused_tokens: int) -> int:
        """Return the number of `reused_tokens` to recompute: at least one unless the ratio is 0."""
        if self.ratio == 0 or reused_tokens == 0:
            return 0
        return max(1, int(self.ratio * reused_tokens))


@dataclass(frozen=True, slots=True)
class VerifiedRatio:
    """The ratio that the verdict beside the store recommends; `FusionEngine.load` puts that `FixedRatio` in its place.

    Attributes:
        default: fraction in [0, 1] until there is a verdict.
    """

    default: float

    @property
    def ratio(self) -> float:
        """The default."""
        return self.default

    def tokens(self, reused_tokens: int) -> int:
        """Return the number of `reused_tokens` to recompute at the default ratio."""
        return FixedRatio(self.default).tokens(reused_tokens)


Ratio = FixedRatio | VerifiedRatio
"""The budgets that are a share of the reused tokens."""


@dataclass(frozen=True, slots=True)
class Method:
    """The parts that decide what to reuse and what to recompute.

    Attributes:
        name: as in the method table.
        base: the stored caches that chunks start from; None reuses nothing, which is full prefill.
        adapter: alters or replaces a stored chunk before it is placed; None leaves it as it is.
        fallbacks: the bases of which a chunk is taken that is not stored under `base`, in this order.
        exact_first: take a chunk under whichever of these bases equals full prefill's at its position, if one does: a
            prompt's first passage, framed.
        probe: scores tokens; None for methods without scores.
        selector: turns scores into rows.
        budget: the number of reused tokens to recompute; None leaves the number to the selector.
        layer_hook: makes the hook between the layers of the fused pass; None for no hook.
        guard: decides when to compute everything instead; None never does.
        residuals: adds estimated corrections to the keys and values of passage tokens that are not recomputed, on a
            CPU; None does not. Methods with a layer hook are not corrected.
        choice: how it chooses tokens, in plain words; None only says that it does.
    """

    name: str
    base: Base | None
    adapter: Adapter | None = None
    fallbacks: tuple[Base, ...] = ()
    exact_first: bool = False
    probe: Probe | None = None
    selector: Selector = field(default_factory=SelectNone)
    budget: Budget | None = field(default_factory=lambda: FixedRatio(0.0))
    layer_hook: LayerHookFactory | None = None
    guard: Guard | None = None
    residuals: ResidualKernel | None = None
    choice: Choice | None = field(default=None, repr=False, compare=False)

    @property
    def bases(self) -> tuple[Base, ...]:
        """Every base that chunks may be read under, `base` first."""
        return () if self.base is None else tuple(dict.fromkeys((self.base, *self.fallbacks)))

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
