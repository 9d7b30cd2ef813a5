"""Shadow mode: compare a sample of the requests with full prefill, to measure how far fusion drifts.

A verdict measures a method beforehand; shadow mode measures it on the real questions. Answers stay as they are. Full
prefill runs afterwards, in a background thread, while no request is being prefilled. A few prompts wait in memory and
are dropped after their comparison, so two numbers are all that is kept of a question.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from torch import Tensor

from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled, prefill
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.runner import ModelRunner

logger = logging.getLogger(__name__)

DriftAction = Literal["report", "raise", "full"]

MAX_RATIO = 0.5
"""Highest ratio to raise to; above it full prefill costs little more and is the next step."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far fused requests were from full prefill.

    Attributes:
        requests: number of fused requests with at least one stored passage.
        compared: number of requests that were compared with full prefill.
        dropped: requests that were to be compared, but too many others waited.
        kl: mean divergence of the first token over the last comparisons, in nats; None before the first comparison.
        agreement: share of these comparisons in which the first token was full prefill's.
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
        limit: mean divergence, in nats, above which fusion drifts.
        window: number of comparisons in the mean; drift is sustained when the mean of a whole window exceeds the limit.
        on_drift: what to do about sustained drift: only `report` it, `raise` the ratio (double it, then prefill in
            full), or prefill in `full`.
        most_waiting: most prompts that may wait for their comparison; further prompts are dropped and counted.

    Raises:
        ValueError: if a setting is out of range.
    """

    every: int = 50
    limit: float = 0.25
    window: int = 10
    on_drift: DriftAction = "report"
    most_waiting: int = 4

    def __post_init__(self) -> None:
        if self.every < 1 or self.window < 1 or self.most_waiting < 1:
            raise ValueError("every, window and most_waiting must be at least 1")
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


class Shadow:
    """Compares a sample of an engine's requests with full prefill, in a background thread.

    Args:
        runner: computes the full prefills.
        settings: the settings.
        in_flight: the engine's running prefills; comparisons wait for them.
    """

    def __init__(self, runner: ModelRunner, settings: ShadowSettings, in_flight: InFlight) -> None:
        self.settings = settings
        self._runner, self._in_flight = runner, in_flight
        self._waiting: deque[tuple[Prompt, Tensor, float]] = deque()
        self._comparisons: deque[tuple[float, bool]] = deque(maxlen=settings.window)
        self._changed = threading.Condition()
        self._requests = self._compared = self._dropped = self._failed = 0
        self._error: str | None = None
        self._ratio: float | None = None
        self._method_ratio = 0.0
        self._sustained = self._full_prefill = self._closed = self._busy = False
        self._thread = threading.Thread(target=self._run, name="qcfuse-shadow", daemon=True)
        self._thread.start()

    def method(self, requested: Method) -> Method:
        """Return the method to run in place of the requested one, after sustained drift."""
        with self._changed:
            if self._full_prefill:
                return requested.as_full_prefill
            raised = self._ratio
            ratio = requested.budget.ratio if isinstance(requested.budget, FixedRatio) else None
            self._method_ratio = ratio or self._method_ratio
        if raised is None or ratio is None or ratio >= raised:
            return requested
        return replace(requested, budget=FixedRatio(raised))

    def note(self, prefilled: Prefilled) -> None:
        """Count a fused request, and queue one of every `settings.every` for comparison."""
        fused = any(lookup.hit and lookup.role == "chunk" for lookup in prefilled.report.lookups)
        with self._changed:
            if self._closed or not fused:
                return
            self._requests += 1
            if self._requests % self.settings.every:
                return
            if len(self._waiting) >= self.settings.most_waiting:
                self._dropped += 1
                return
            self._waiting.append((prefilled.prompt, prefilled.logits.clone(), prefilled.report.ratio))
            self._changed.notify_all()

    def drift(self) -> Drift:
        """Return the drift so far."""
        with self._changed:
            return Drift(
                requests=self._requests,
                compared=self._compared,
                dropped=self._dropped,
                kl=fmean(kl for kl, _ in self._comparisons) if self._comparisons else None,
                agreement=fmean(agrees for _, agrees in self._comparisons) if self._comparisons else None,
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
                prompt, logits, ratio = self._waiting.popleft()
                self._busy = True
            try:
                full = prefill(self._runner, prompt, Method("full", base=None))
                kl, agrees = divergence(full.logits, logits), int(full.logits.argmax()) == int(logits.argmax())
                del full
                self._record(kl, agrees, ratio)
            except Exception as error:  # shadow mode survives any error, such as too little memory
                with self._changed:
                    self._failed, self._error = self._failed + 1, f"{type(error).__name__}: {error}"
                logger.warning("a request could not be compared with full prefill: %s", error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _record(self, kl: float, agrees: bool, ratio: float) -> None:
        with self._changed:
            if self._ratio is not None and ratio < self._ratio:
                return  # prefilled before the ratio was raised
            self._comparisons.append((kl, agrees))
            self._compared += 1
            mean = fmean(kl for kl, _ in self._comparisons)
            self._sustained = len(self._comparisons) == self.settings.window and mean > self.settings.limit
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
