"""Shadow mode: compare a sample of the requests with full prefill, to measure how far fusion drifts.

A verdict measures a method beforehand; shadow mode measures it on the real questions. Answers stay as they are. A
background thread prefills the prompt again afterwards, in full and by the same method, and compares both along the
beginning of full prefill's greedy answer. It starts while no request is being prefilled. A few prompts wait in memory
and are dropped after their comparison, so three numbers are all that is kept of a question.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Literal

from annotated_types import Ge

from qcfuse_rag.background_thread import BackgroundThread
from qcfuse_rag.declared_options import check_limits
from qcfuse_rag.fusion.method import FixedRatio, Method, Ratio
from qcfuse_rag.fusion.pipeline import Prefilled, fuse_prompt
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.verification.divergence import Divergence, answer_logits, compare_answers, greedy_answers

LOG = logging.getLogger(__name__)

MAX_RATIO = 0.5
"""Highest ratio to raise to; above it full prefill costs little more and is the next step."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far fused requests were from full prefill; means are of the last comparisons, and None before these.

    Requests that were to be compared are dropped if too many others wait, their passages were removed, or the ratio was
    raised meanwhile.
    """

    requests: int = 0  # fused ones with at least one stored passage
    compared: int = 0  # requests that were compared with full prefill
    dropped: int = 0
    kl: float | None = None  # mean divergence along full prefill's answers, in nats a token
    agreement: float | None = None  # mean share of these answers' tokens that were predicted
    identical: float | None = None  # share of comparisons in which the answer was full prefill's
    sustained: bool = False  # whether the mean over a whole window exceeds the limit
    ratio: float | None = None  # the raised ratio; None while the method's ratio is in use
    in_full: bool = False  # whether requests are prefilled in full now
    failed: int = 0  # comparisons that failed
    error: str | None = None  # of the last failed comparison


@dataclass(frozen=True, slots=True)
class ShadowSettings:
    """Settings of shadow mode.

    Attributes:
        every: compare one of this many requests.
        limit: mean divergence, in nats a token, above which fusion drifts.
        window: number of comparisons in the mean; drift is sustained when the mean of a whole window exceeds the limit.
        on_drift: what to do about sustained drift: only `report` it, `raise` the ratio (double it, then prefill in
            full), or prefill in `full`.
        most_waiting: most prompts that may wait for their comparison; further prompts are dropped and counted.
        answer_tokens: most tokens of an answer to compare.

    Raises:
        ValueError: if a setting is out of range.
    """

    every: Annotated[int, Ge(1)] = 50
    limit: float = 0.25
    window: Annotated[int, Ge(1)] = 10
    on_drift: Literal["report", "raise", "full"] = "report"
    most_waiting: Annotated[int, Ge(1)] = 4
    answer_tokens: Annotated[int, Ge(1)] = 16

    def __post_init__(self) -> None:
        check_limits(self)
        if self.on_drift not in ("report", "raise", "full"):
            raise ValueError(f"on_drift must be 'report', 'raise' or 'full', got {self.on_drift!r}")


class Shadow:
    """Compares a sample of an engine's requests with full prefill, in a background thread."""

    def __init__(self, runner: ModelRunner, settings: ShadowSettings) -> None:
        self.settings = settings
        self._runner = runner
        # With the method used, and the share it recomputed.
        self._waiting: deque[tuple[Prompt, Method, float]] = deque()
        self._compared: deque[Divergence] = deque(maxlen=settings.window)
        self._changed = threading.Condition()
        self._prefilling = 0
        self._drift = Drift()
        self._method_ratio = 0.0
        self._closed = self._busy = False
        self._thread = BackgroundThread(self._run, name="qcfuse-shadow", close=self.close)

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        """Count a request as being prefilled while the block runs; comparisons wait for it."""
        with self._changed:
            self._prefilling += 1
        try:
            yield
        finally:
            with self._changed:
                self._prefilling -= 1
                self._changed.notify_all()

    def method(self, requested: Method) -> Method:
        """Return the method to run in place of the requested one, after sustained drift."""
        with self._changed:
            raised = self._drift.ratio
            if self._drift.in_full:
                return requested.as_full_prefill
            ratio = requested.budget.ratio if isinstance(requested.budget, Ratio) else None
            self._method_ratio = ratio or self._method_ratio
        if raised is None or ratio is None or ratio >= raised:
            return requested
        # A verdict's residuals are for the verdict's own ratio only.
        return replace(requested, budget=FixedRatio(raised), residuals=None)

    def note(self, prefilled: Prefilled, method: Method) -> None:
        """Count a request that a method fused, and queue one of every `settings.every` for comparison."""
        with self._changed:
            if self._closed or not _is_fused(prefilled):
                return
            self._count(requests=1)
            if self._drift.requests % self.settings.every:
                return
            if len(self._waiting) >= self.settings.most_waiting:
                self._count(dropped=1)
                return
            self._waiting.append((prefilled.prompt, method, prefilled.report.ratio))
            self._changed.notify_all()

    def drift(self) -> Drift:
        """Return the drift so far."""
        with self._changed:
            if not self._compared:
                return self._drift
            figures = [(each.mean_kl, each.top1, each.identical) for each in self._compared]
            kl, agreement, identical = map(fmean, zip(*figures, strict=True))
            return replace(self._drift, kl=kl, agreement=agreement, identical=identical)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no comparison is pending; return whether this is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self) -> None:
        """Stop the thread and drop the waiting prompts."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._waiting and not self._prefilling))
                if self._closed:
                    return
                prompt, method, ratio = self._waiting.popleft()
                self._busy = True
            try:
                self._record(self._compare(prompt, method), ratio)
            except Exception as error:  # shadow mode survives any error, such as too little memory
                with self._changed:
                    self._count(failed=1)
                    self._drift = replace(self._drift, error=f"{type(error).__name__}: {error}")
                LOG.warning("a request could not be compared with full prefill: %s", error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _compare(self, prompt: Prompt, method: Method) -> Divergence | None:
        runner = self._runner
        tokens = min(self.settings.answer_tokens, runner.lm.context_window.tokens - len(prompt) + 1)
        full = fuse_prompt(runner, prompt, Method("full", base=None), answer_tokens=tokens - 1)
        self._let_requests_begin()
        [(ids, logits)] = greedy_answers(runner, [full], tokens)
        del full
        self._let_requests_begin()
        fused = fuse_prompt(runner, prompt, method.unguarded, answer_tokens=tokens - 1)
        return compare_answers(logits, answer_logits(runner, fused, ids)) if _is_fused(fused) else None

    def _let_requests_begin(self) -> None:
        """Wait for the requests that arrived meanwhile, for at most a second."""
        with self._changed:
            self._changed.wait_for(lambda: not self._prefilling, 1.0)

    def _record(self, compared: Divergence | None, ratio: float) -> None:
        with self._changed:
            drift = self._drift
            prefilled_before_raise = drift.ratio is not None and ratio < drift.ratio
            if compared is None or prefilled_before_raise:
                self._count(dropped=1)
                return
            self._compared.append(compared)
            self._count(compared=1)
            mean = fmean(each.mean_kl for each in self._compared)
            sustained = len(self._compared) == self.settings.window and not mean <= self.settings.limit
            self._drift = replace(self._drift, sustained=sustained)
            if sustained and self.settings.on_drift == "full":
                self._drift = replace(self._drift, in_full=True)
            elif sustained and self.settings.on_drift == "raise":
                raised = 2 * max(drift.ratio or 0.0, self._method_ratio)
                can_raise = 0 < raised <= MAX_RATIO
                self._drift = replace(self._drift, **({"ratio": raised} if can_raise else {"in_full": True}))
                self._compared.clear()  # the next window holds only requests at the new ratio

    def _count(self, **more: int) -> None:
        self._drift = replace(self._drift, **{name: getattr(self._drift, name) + n for name, n in more.items()})


def _is_fused(prefilled: Prefilled) -> bool:
    return any(lookup.hit and lookup.role == "chunk" for lookup in prefilled.report.lookups)
