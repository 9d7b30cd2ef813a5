"""Warn once if prompts hardly reuse a store that has passages: nothing else says so while every answer is right."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

from qcfuse_rag.errors import StoreError
from qcfuse_rag.fusion.report import FusionReport

PROMPTS = 20
"""How many prompts are looked at."""
LITTLE = 0.2
"""A share of their passages' tokens that is too little."""

LOG = logging.getLogger(__name__)


class ReuseMonitor:
    """Looks at the last prompts of an engine. `stored_passages` counts those that could be recognised.

    Safe to use from several threads.
    """

    def __init__(self, stored_passages: Callable[[], int]) -> None:
        self._stored_passages = stored_passages
        self._last: deque[FusionReport] = deque(maxlen=PROMPTS)
        self._warned = False
        self._lock = threading.Lock()

    def note(self, report: FusionReport) -> None:
        """Look at a prompt with passages, or with text that may be some."""
        if self._warned or not (report.passages or report.unrecognised_tokens):
            return
        with self._lock:
            self._last.append(report)
            last = list(self._last)
        reused = sum(report.stored_tokens + report.prefix_tokens for report in last)
        tokens = sum(report.context_tokens + report.unrecognised_tokens for report in last)
        if len(last) < PROMPTS or reused >= LITTLE * tokens:
            return
        try:
            stored = self._stored_passages()
        except StoreError:
            return
        if stored and not self._warned:
            self._warned = True
            reasons = Counter(report.fallback.split("; ")[0] for report in last if report.fallback)
            reason, count = next(iter(reasons.most_common(1)), ("by the method", PROMPTS))
            LOG.warning(
                "only %d %% of the last %d prompts was reused, although %d passages are stored; %d times: %s",
                round(100 * reused / tokens),
                PROMPTS,
                stored,
                count,
                reason,
            )
