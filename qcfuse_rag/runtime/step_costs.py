"""Costs of decode steps that compute further rows in the same pass, measured once in a process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.device import fastest_s
from qcfuse_rag.runtime.graphs.decode_graphs import DecodeRunner
from qcfuse_rag.runtime.graphs.prefill_graphs import PrefillRunner
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.rows import RowsPlan

CONTEXT_TOKENS = 1024
"""Length of the prompt that steps are measured over."""

ROWS = {"cpu": (8, 64), "cuda": (32, 256)}
"""Rows of the two measured passes, by device; their difference is the cost of more rows."""
MOST_ROWS = 512
"""Most rows beside a step: where more rows measure no slower, the measurement says nothing of many more."""


@dataclass(frozen=True, slots=True)
class HealingPace:
    """How fast a running answer's prompt is healed.

    Attributes:
        rows: rows to heal beside a step.
        interval: steps from one that heals to the next; 1 heals beside every step.
    """

    rows: int
    interval: int


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs in seconds: a decode step with `R` further rows takes `step_s + extra_s + R row_s`.

    Attributes:
        step_s: a decode step alone.
        extra_s: the cost of any further rows; products of one row are faster than those of two.
        row_s: the cost of each further row.
    """

    step_s: float
    extra_s: float
    row_s: float

    def pass_s(self, rows: int) -> float:
        """Predict the seconds of a step with further rows."""
        return self.step_s + self.extra_s + rows * self.row_s

    @property
    def rows_like_a_step(self) -> int:
        """Number of further rows that take about as long as a step, which reads the weights; 1 to `MOST_ROWS`."""
        return min(MOST_ROWS, max(1, round(self.step_s / self.row_s)))

    def pace(self, slowdown: float) -> HealingPace | None:
        """Return how many rows to heal, and in which steps, so that steps take at most this share longer on average.

        Where no row fits beside every step, a pass has so many rows that they take about as long as a step. None if
        steps may take no longer.
        """
        if rows := self.rows_beside(slowdown):
            return HealingPace(rows, 1)
        if slowdown <= 0:
            return None
        rows = self.rows_like_a_step
        return HealingPace(rows, math.ceil((self.extra_s + rows * self.row_s) / (slowdown * self.step_s)))

    def rows_beside(self, slowdown: float) -> int:
        """Return how many rows fit beside a step that may take this share longer: a power of two up to a limit, or 0.

        Measurements vary from one process to the next; powers of two vary less.
        """
        rows = int((slowdown * self.step_s - self.extra_s) / self.row_s)
        return min(MOST_ROWS, 1 << (rows.bit_length() - 1)) if rows > 0 else 0


class MeasuredStepCosts:
    """The costs of a model's steps on this machine; call the object to get them.

    The first call measures them, and the first call after passes or steps are recorded. Safe to call from several
    threads.

    Args:
        lm: the model.
        prefills: runs passes over rows.
        decodes: runs decode steps.
    """

    def __init__(self, lm: LanguageModel, prefills: PrefillRunner, decodes: DecodeRunner) -> None:
        self._lm, self._prefills, self._decodes = lm, prefills, decodes
        self._costs: StepCosts | None = None
        self._recorded = (False, False)
        self._lock = threading.Lock()

    def __call__(self) -> StepCosts:
        """Return the costs."""
        with self._lock:
            recorded = (self._prefills.refusal is None, self._decodes.refusal is None)
            if self._costs is None or recorded != self._recorded:
                self._costs, self._recorded = self._measure(), recorded
            return self._costs

    @torch.inference_mode()
    def _measure(self, samples: int = 3) -> StepCosts:
        """Time steps alone and with two numbers of rows; the fastest sample counts, which is disturbed least."""
        lm = self._lm
        few, many = ROWS.get(lm.device.type, ROWS["cpu"])
        length = min(CONTEXT_TOKENS, lm.context_window.tokens)
        few, many = min(few, length // 4), min(many, length // 2)
        buffer = lm.empty_buffer(length)
        for tensor in (*buffer.keys, *buffer.values):
            tensor.zero_()

        def seconds(work: Callable[[], object]) -> float:
            work()  # pays for one-time setup
            return fastest_s(lm.device, work, samples)

        step_s = seconds(lambda: self._decodes([0], [length - 1], [buffer]))
        few_s, many_s = (seconds(partial(self._step_beside, rows, length, buffer)) for rows in (few, many))
        row_s = max(many_s - few_s, 1e-9) / max(1, many - few)
        return StepCosts(step_s, max(0.0, few_s - few * row_s - step_s), row_s)

    def _step_beside(self, rows: int, length: int, buffer: KVBuffer) -> None:
        """Compute rows in the middle of the buffer, and its last row."""
        start = (length - rows) // 2
        lm, positions = self._lm, [*range(start, start + rows), length - 1]
        plan = RowsPlan.of(torch.tensor(positions), lm.sliding, device=lm.device)
        self._prefills.forward_rows(torch.zeros_like(plan.rows), plan, buffer)
