"""Guards: compute a prompt in full where fusing is predicted not to be faster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from qcfuse_rag.runtime.costs import Costs

IN_FULL = "computed in full"
"""The beginning of a guard's reason."""


@dataclass(frozen=True, slots=True)
class PrefillEstimate:
    """The work of a fused prefill, estimated before anything is loaded.

    Attributes:
        prompt_tokens: length of the prompt, without `held_tokens`.
        stored_tokens: tokens of its segments that the store has.
        selected_tokens: stored tokens that would be recomputed.
        probe_rows: rows that the method's probe computes; 0 without a probe.
        probe_share: share of the layers that the probe runs.
        passages: number of passages in the prompt.
        absent: number of passages that the store does not have.
        near_tokens: tokens of its segments that the store's nearest tier has.
        held_tokens: leading tokens whose keys and values an earlier request computed.
    """

    prompt_tokens: int
    stored_tokens: int
    selected_tokens: int
    probe_rows: int
    probe_share: float
    passages: int = 0
    absent: int = 0
    near_tokens: int = 0
    held_tokens: int = 0

    @property
    def all_near(self) -> PrefillEstimate:
        """The estimate if the nearest tier had all that is stored."""
        return replace(self, near_tokens=self.stored_tokens)

    @property
    def rows(self) -> int:
        """Rows that the fused pass would compute."""
        return self.prompt_tokens - self.stored_tokens + self.selected_tokens


def predict_fused_s(estimate: PrefillEstimate, costs: Costs) -> float:
    """Predict the seconds of a fused prefill."""
    return costs.fused_s(
        prompt_tokens=estimate.prompt_tokens,
        held_tokens=estimate.held_tokens,
        stored_tokens=estimate.stored_tokens,
        near_tokens=estimate.near_tokens,
        probe_rows=estimate.probe_rows,
        probe_share=estimate.probe_share,
        rows=estimate.rows,
    )


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
        fused_s = predict_fused_s(estimate, costs)
        if fused_s < self.margin * full_s:
            return None
        saved = f"less than {1 - self.margin:.0%} would be saved" if fused_s < full_s else "nothing would be saved"
        return f"{IN_FULL}, {saved}: predicted to take {full_s:.3g} s, fused {fused_s:.3g} s"
