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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from qcfuse_rag.background_thread import BackgroundThread
from qcfuse_rag.fusion.budgets import FixedRatio, Ratio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled, fuse_prompt
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.generation.teacher_forcing import answer_logits, greedy_answer
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.verification.divergence import AnswerDivergence, compare_answers

LOG = logging.getLogger(__name__)

DriftAction = Literal["report", "raise", "full"]

MAX_RATIO = 0.5
"""Highest ratio to raise to; above it full prefill costs little more and is the next step."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far fused requests were from full prefill.

    Attributes:
        requests: number of fused requests with at least one stored passage.
        compared: number of requests that were compared with full prefill.
        dropped: requests that were to be compared, but too many others waited, their passages were removed, or the
            ratio was raised meanwhile.
        kl: mean divergence along full prefill's answers over the last comparisons, in nats a token; None before the
            first comparison.
        agreement: mean share of these answers' tokens that were predicted.
        identical: share of these comparisons in which the answer was full prefill's.
        sustained: whether the mean over a whole window exceeds the limit.
        ratio: the raised ratio, or None while the method's ratio is in use.
        in_full: whether requests are prefilled in full now.
        failed: number of comparisons that failed.
        error: of the last failed comparison.
    """

    requests: int
    compared: int
    dropped: int
    kl: float | None
    agreement: float | None
    identical: float | None
    sustained: bool
    ratio: float | None
    in_full: bool
    failed: int = 0
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


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

    every: int = 50
    limit: float = 0.25
    window: int = 10
    on_drift: DriftAction = "report"
    most_waiting: int = 4
    answer_tokens: int = 16

    def __post_init__(self) -> None:
        if min(self.every, self.window, self.most_waiting, self.answer_tokens) < 1:
            raise ValueError("every, window, most_waiting and answer_tokens must be at least 1")
        if self.on_drift not in ("report", "raise", "full"):
            raise ValueError(f"on_drift must be 'report', 'raise' or 'full', got {self.on_drift!r}")


class InFlight:
    """Counts the requests that are being prefilled now."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count a request while the block runs."""
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds until no request is being prefilled; return whether this is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedPrompt:
    """A prompt that waits for its comparison, with the method that answered it and the share it recomputed."""

    prompt: Prompt
    method: Method
    ratio: float


class Shadow:
    """Compares a sample of an engine's requests with full prefill, in a background thread.

    Args:
        runner: computes the comparisons.
        settings: the settings.
        in_flight: the engine's running prefills; comparisons wait for them.
    """

    def __init__(self, runner: ModelRunner, settings: ShadowSettings, in_flight: InFlight) -> None:
        self.settings = settings
        self._runner, self._in_flight = runner, in_flight
        self._waiting: deque[_QueuedPrompt] = deque()
        self._comparisons: deque[tuple[float, float, bool]] = deque(maxlen=settings.window)  # KL, top-1, identical
        self._changed = threading.Condition()
        self._requests = self._compared = self._dropped = self._failed = 0
        self._error: str | None = None
        self._ratio: float | None = None
        self._method_ratio = 0.0
        self._sustained = self._full_prefill = self._closed = self._busy = False
        self._thread = BackgroundThread(self._run, name="qcfuse-shadow", close=self.close)

    def method(self, requested: Method) -> Method:
        """Return the method to run in place of the requested one, after sustained drift."""
        with self._changed:
            if self._full_prefill:
                return requested.as_full_prefill
            raised = self._ratio
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
            self._requests += 1
            if self._requests % self.settings.every:
                return
            if len(self._waiting) >= self.settings.most_waiting:
                self._dropped += 1
                return
            self._waiting.append(_QueuedPrompt(prefilled.prompt, method, prefilled.report.ratio))
            self._changed.notify_all()

    def drift(self) -> Drift:
        """Return the drift so far."""
        with self._changed:
            means = tuple(map(fmean, zip(*self._comparisons, strict=True)))
            kl, agreement, identical = means or (None, None, None)
            return Drift(
                requests=self._requests,
                compared=self._compared,
                dropped=self._dropped,
                kl=kl,
                agreement=agreement,
                identical=identical,
                sustained=self._sustained,
                ratio=self._ratio,
                in_full=self._full_prefill,
                failed=self._failed,
                error=self._error,
            )

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
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            if not self._in_flight.wait_idle(1.0):
                continue
            with self._changed:
                if not self._waiting:
                    continue
                queued = self._waiting.popleft()
                self._busy = True
            try:
                self._record(self._compare(queued), queued.ratio)
            except Exception as error:  # shadow mode survives any error, such as too little memory
                with self._changed:
                    self._failed, self._error = self._failed + 1, f"{type(error).__name__}: {error}"
                LOG.warning("a request could not be compared with full prefill: %s", error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _compare(self, queued: _QueuedPrompt) -> AnswerDivergence | None:
        """Compare along full prefill's answer; return None if the passages are no longer stored.

        Between its parts it lets requests that arrived meanwhile begin first, for at most a second each time.
        """
        runner, prompt = self._runner, queued.prompt
        tokens = min(self.settings.answer_tokens, runner.lm.context_window.tokens - len(prompt) + 1)
        full = fuse_prompt(runner, prompt, Method("full", base=None), answer_tokens=tokens - 1)
        self._in_flight.wait_idle(1.0)
        ids, logits = greedy_answer(runner, full, tokens)
        del full
        self._in_flight.wait_idle(1.0)
        fused = fuse_prompt(runner, prompt, queued.method.unguarded, answer_tokens=tokens - 1)
        return compare_answers(logits, answer_logits(runner, fused, ids)) if _is_fused(fused) else None

    def _record(self, compared: AnswerDivergence | None, ratio: float) -> None:
        with self._changed:
            if compared is None:
                self._dropped += 1
                return
            if self._ratio is not None and ratio < self._ratio:  # prefilled before the ratio was raised
                self._dropped += 1
                return
            self._comparisons.append((compared.mean_kl, compared.top1, compared.identical))
            self._compared += 1
            mean = fmean(kl for kl, *_ in self._comparisons)
            self._sustained = len(self._comparisons) == self.settings.window and not mean <= self.settings.limit
            if not self._sustained:
                return
            if self.settings.on_drift == "full":
                self._full_prefill = True
            elif self.settings.on_drift == "raise":
                self._raise_ratio()
                self._comparisons.clear()  # the next window holds only requests at the new ratio

    def _raise_ratio(self) -> None:
        ratio = 2 * max(self._ratio or 0.0, self._method_ratio)
        if not 0 < ratio <= MAX_RATIO:
            self._full_prefill = True
        else:
            self._ratio = ratio


def _is_fused(prefilled: Prefilled) -> bool:
    return any(lookup.hit and lookup.role == "chunk" for lookup in prefilled.report.lookups)


ReportObserver = Callable[[FusionReport], None]


class PrefillWatch:
    """The shadow mode and the observers of an engine.

    Args:
        runner: computes the comparisons of shadow mode.

    Attributes:
        in_flight: the prefills that run now.
        shadow: shadow mode, where it is on.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.in_flight = InFlight()
        self.shadow: Shadow | None = None
        self._runner = runner
        self._observers: tuple[ReportObserver, ...] = ()

    def observe(self, observer: ReportObserver) -> None:
        """Call an observer with every report from now on; its errors are logged."""
        self._observers = (*self._observers, observer)

    def start_shadow(self, settings: ShadowSettings) -> Shadow:
        """Start shadow mode anew."""
        self.close()
        self.shadow = Shadow(self._runner, settings, self.in_flight)
        return self.shadow

    @contextmanager
    def prefill(self, default: Method, own: Method | None) -> Iterator[WatchedPrefill]:
        """Count a prefill as running while the block runs.

        Args:
            default: the engine's method, which shadow mode compares, and replaces after drift.
            own: the request's own method, which it leaves alone.
        """
        shadow = self.shadow if own is None else None
        method = own or default
        with self.in_flight.track():
            yield WatchedPrefill(method if shadow is None else shadow.method(method), shadow, self)

    def notify(self, report: FusionReport) -> None:
        """Call the observers."""
        for observer in self._observers:
            try:
                observer(report)
            except Exception:
                LOG.exception("an observer of fused prefills failed; the answer is not affected")

    def close(self) -> None:
        """End shadow mode."""
        if self.shadow is not None:
            self.shadow.close()


class WatchedPrefill:
    """A prefill that is watched.

    Attributes:
        method: the method to prefill by.
    """

    def __init__(self, method: Method, shadow: Shadow | None, watch: PrefillWatch) -> None:
        self.method = method
        self._shadow, self._watch = shadow, watch

    def finish(self, prefilled: Prefilled) -> None:
        """Give the result to shadow mode and the report to the observers; call it when the prefill runs no more."""
        if self._shadow is not None:
            self._shadow.note(prefilled, self.method)
        self._watch.notify(prefilled.report)
