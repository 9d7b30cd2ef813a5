"""Predict the time of a prefill on this machine from the prices of rows, keys and tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace


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


@dataclass(frozen=True, slots=True)
class Costs:
    """Six costs in seconds that predict a prefill, and one more where layers are recurrent.

    To compute `R` rows that see `K` keys each takes `R (row_s + K key_s)`. On a CPU, a pass takes `pass_s` and that. On
    a GPU, it takes the longer of both: the host launches kernels while the device computes. A pass that is recorded as
    CUDA graphs has `recorded_pass_s` in place of `pass_s`. To load a token takes `near_load_s` if the nearest tier has
    it, else `load_s`.

    Attributes:
        pass_s: the fixed cost of a pass: reading the weights on a CPU, launching kernels on a GPU.
        row_s: the cost of each row.
        load_s: the cost of loading a token that the nearest tier does not have.
        near_load_s: the same of a token that it has; None if it is `load_s`.
        key_s: the cost of each key that a row sees.
        recorded_pass_s: the fixed cost of a recorded pass in a fused prefill, its share of the lookups included.
        recorded_rows: most rows of a recorded pass; 0 without recordings.
        overlaps: whether launching and loading take no time from computing: on a GPU.
        scan_s: the cost of each token over which the recurrences of a pass run; it is a part of `row_s`. A fused pass
            has it for all tokens before its last row.
    """

    pass_s: float
    row_s: float
    load_s: float = 0.0
    near_load_s: float | None = None
    key_s: float = 0.0
    recorded_pass_s: float = 0.0
    recorded_rows: int = 0
    overlaps: bool = False
    scan_s: float = 0.0

    def at_pace(self, pace: float) -> Costs:
        """Return the costs while everything takes so many times as long."""
        times = {name: pace * getattr(self, name) for name in ("pass_s", "row_s", "load_s", "key_s", "scan_s")}
        near_load_s = None if self.near_load_s is None else pace * self.near_load_s
        return replace(self, near_load_s=near_load_s, recorded_pass_s=pace * self.recorded_pass_s, **times)

    def full_pass_s(self, rows: int, held: int = 0) -> float:
        """Predict the seconds of a pass over a whole prompt that follows `held` tokens with cached keys and values."""
        return self._pass_s(self.pass_s, rows, held + rows / 2)

    def partial_pass_s(self, rows: int, keys: float = 0, share: float = 1.0, length: int = 0) -> float:
        """Predict the seconds of a pass over some rows of `length` tokens, through a share of the layers.

        The rows see so many keys.
        """
        fixed_s = self.pass_s if rows > self.recorded_rows else self.recorded_pass_s
        return share * self._pass_s(fixed_s, rows, keys, max(0, length - rows))

    def _pass_s(self, fixed_s: float, rows: int, keys: float, others: int = 0) -> float:
        computing_s = rows * (self.row_s + keys * self.key_s) + others * self.scan_s
        if not rows:
            return 0.0
        return max(fixed_s, computing_s) if self.overlaps else fixed_s + computing_s

    def keys_of_rows(self, estimate: PrefillEstimate) -> float:
        """Return how many keys a pass computes for each row in the mean: some rows' on a CPU also those behind them."""
        halved = self.overlaps or estimate.rows == estimate.prompt_tokens
        return estimate.held_tokens + estimate.prompt_tokens / (2 if halved else 1)

    def fused_s(self, estimate: PrefillEstimate) -> float:
        """Predict the seconds of a fused prefill.

        The probe's rows see the whole prompt. Recomputed rows are spread over it, and see half of it; a CPU computes
        the other half too. What the nearest tier does not have is copied there first.
        """
        near_load_s = self.load_s if self.near_load_s is None else self.near_load_s
        copy_s = (estimate.stored_tokens - estimate.near_tokens) * (self.load_s - near_load_s)
        load_s = estimate.stored_tokens * near_load_s
        held, tokens = estimate.held_tokens, estimate.prompt_tokens
        probe_s = self.partial_pass_s(estimate.probe_rows, held + tokens, estimate.probe_share, held + tokens)
        rows_s = self.partial_pass_s(estimate.rows, self.keys_of_rows(estimate), length=held + tokens)
        if not self.overlaps:
            return copy_s + load_s + probe_s + rows_s
        return copy_s + (max(load_s, probe_s) + rows_s if probe_s else max(load_s, rows_s))
