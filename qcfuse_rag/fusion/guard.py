"""When not to fuse: where it is predicted to take longer than computing everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qcfuse_rag.runtime.costs import Costs

IN_FULL = "computed in full"
"""How a guard's reason begins."""


class Guard(Protocol):
    """Decides if a prompt is better computed in full."""

    def refusal(self, outlook: PrefillEstimate, costs: Costs) -> str | None:
        """Return why a prompt is not to be fused, or None if it is.

        Args:
            outlook: what fusing would do.
            costs: measured once, so that the same prompt over the same store is always decided alike.
        """
        ...


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Fuse only where it is predicted to be faster than full prefill.

    Short prompts, a slow store, a prompt of which little is stored and a ratio near 1 are computed in full, which is
    exact besides.

    Attributes:
        margin: fuse if the predicted time is below this share of full prefill's; predictions are not exact.
    """

    margin: float = 0.9

    def __post_init__(self) -> None:
        if self.margin <= 0:
            raise ValueError(f"margin must be above 0, got {self.margin}")

    def refusal(self, outlook: PrefillEstimate, costs: Costs) -> str | None:
        """Compare the predictions."""
        full = costs.compute(outlook.prompt_tokens)
        fused = (
            costs.load(outlook.stored_tokens)
            + costs.compute_some(outlook.probe_rows, outlook.probe_share)
            + costs.compute_some(outlook.rows)
        )
        if fused < self.margin * full:
            return None
        saved = f"less than {1 - self.margin:.0%} would be saved" if fused < full else "nothing would be saved"
        return f"{IN_FULL}, {saved}: predicted to take {full:.3g} s, fused {fused:.3g} s"


@dataclass(frozen=True, slots=True)
class PrefillEstimate:
    """What a fused prefill would do, known before anything is loaded.

    Attributes:
        prompt_tokens: length of the prompt.
        stored_tokens: tokens of its segments that the store has.
        selected_tokens: stored tokens that would be recomputed.
        probe_rows: rows the method's probe computes; 0 without one.
        probe_share: share of the layers it computes them in.
        passages: how many the prompt has.
        absent: how many of them the store does not have.
    """

    prompt_tokens: int
    stored_tokens: int
    selected_tokens: int
    probe_rows: int
    probe_share: float
    passages: int = 0
    absent: int = 0

    @property
    def rows(self) -> int:
        """Rows the fused pass would compute."""
        return self.prompt_tokens - self.stored_tokens + self.selected_tokens
