"""Guards: compute a prompt in full where fusing is predicted not to be faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qcfuse_rag.runtime.cost import Costs, PrefillEstimate

IN_FULL = "computed in full"
"""The beginning of a guard's reason."""


class Guard(Protocol):
    """Decides whether a prompt is computed in full instead of fused."""

    def refusal(self, estimate: PrefillEstimate, costs: Costs) -> str | None:
        """Return why a prompt is not to be fused, or None if it is.

        Args:
            estimate: the work of the fused prefill.
            costs: measured once. The decision also depends on which of the passages the nearest tier has.
        """
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
