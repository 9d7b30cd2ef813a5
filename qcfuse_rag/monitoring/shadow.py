"""Shadow mode: compute some requests in full as well, and see how far fusion drifts.

What a verdict says beforehand, this says of the questions that really come. The fused answer is given as ever; full
prefill follows in a thread of its own while no request is being prefilled. Prompts wait in memory, at most a few, and
are gone once compared: nothing of a question is kept but two numbers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor

from qcfuse_rag.fusion.budgets import FixedRatio
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled, prefill
from qcfuse_rag.monitoring.divergence import divergence
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.store.backends.base import KVStore

logger = logging.getLogger(__name__)

Answer = Literal["report", "raise", "full"]

MOST_RATIO = 0.5
"""Ratio from which on raising it further is not worth what it costs: the next step is full prefill."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far fused requests were from full prefill.

    Attributes:
        requests: fused ones in all, with a stored passage at least.
        compared: of those, also computed in full.
        dropped: that should have been but were not, since too many waited.
        kl: mean divergence of the first token over the last comparisons, in nats; None before the first.
        agreement: share of their first tokens that were full prefill's.
        sustained: whether as many comparisons as it takes were beyond the limit on average.
        ratio: the ratio that was raised to, or None while it is the method's own.
        in_full: whether requests are computed in full now.
        failed: that could not be computed in full.
        error: why the last of them could not.
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
    """How to watch.

    Attributes:
        every: compare one in so many requests.
        limit: mean divergence in nats beyond which fusion is drifting.
        window: comparisons to take the mean of; drift is sustained when so many are over the limit on average.
        answer: what follows: `report` it only, `raise` the ratio (doubled, then in full), or compute in `full`.
        most_waiting: prompts that may wait for their comparison; more are dropped and counted.
    """

    every: int = 50
    limit: float = 0.25
    window: int = 10
    answer: Answer = "report"
    most_waiting: int = 4

    def __post_init__(self) -> None:
        if self.every < 1 or self.window < 1 or self.most_waiting < 1:
            raise ValueError("every, window and most_waiting must be at least 1")
        if self.answer not in ("report", "raise", "full"):
            raise ValueError(f"answer must be 'report', 'raise' or 'full', got {self.answer!r}")


class Shadow:
    """Watches an engine's requests.

    Args:
        lm: the model.
        store: handed to full prefill, which reads nothing from it.
        settings: how to watch.
        idle: blocks until no request is being prefilled, at most so many seconds; returns whether that is so.
    """

    def __init__(
        self, lm: LanguageModel, store: KVStore, settings: ShadowSettings, idle: Callable[[float], bool]
    ) -> None:
        self.settings = settings
        self._lm, self._store, self._idle = lm, store, idle
        self._waiting: deque[tuple[Prompt, Tensor, float]] = deque()
        self._last: deque[tuple[float, bool]] = deque(maxlen=settings.window)
        self._changed = threading.Condition()
        self._requests = self._compared = self._dropped = self._failed = 0
        self._error: str | None = None
        self._ratio: float | None = None
        self._asked = 0.0
        self._sustained = self._in_full = self._closed = self._busy = False
        self._thread = threading.Thread(target=self._run, name="qcfuse-shadow", daemon=True)
        self._thread.start()

    def method(self, asked: Method) -> Method:
        """Return the method to use in place of the one asked for: what sustained drift has made of it."""
        with self._changed:
            if self._in_full:
                return asked.as_full_prefill
            ratio = self._ratio
            own = asked.budget.ratio if isinstance(asked.budget, FixedRatio) else None
            self._asked = own or self._asked
        return asked if ratio is None or own is None or own >= ratio else replace(asked, budget=FixedRatio(ratio))

    def note(self, done: Prefilled) -> None:
        """Take up one request in so many, of those that were fused."""
        fused = any(lookup.hit and lookup.role == "chunk" for lookup in done.report.lookups)
        with self._changed:
            if self._closed or not fused:
                return
            self._requests += 1
            if self._requests % self.settings.every:
                return
            if len(self._waiting) >= self.settings.most_waiting:
                self._dropped += 1
                return
            self._waiting.append((done.prompt, done.logits.clone(), done.report.ratio))
            self._changed.notify_all()

    def drift(self) -> Drift:
        """Return what has been seen so far."""
        with self._changed:
            last = list(self._last)
            kl = sum(one for one, _ in last) / len(last) if last else None
            agreement = sum(agrees for _, agrees in last) / len(last) if last else None
            counts = self._requests, self._compared, self._dropped
            failed, error = self._failed, self._error
            return Drift(*counts, kl, agreement, self._sustained, self._ratio, self._in_full, failed, error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits to be compared; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self) -> None:
        """Stop watching; what waits is not compared any more."""
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
            if not self._idle(1.0):
                continue
            with self._changed:
                if not self._waiting:
                    continue
                prompt, logits, ratio = self._waiting.popleft()
                self._busy = True
            try:
                full = prefill(self._lm, self._store, prompt, Method("full", base=None))
                kl, agrees = divergence(full.logits, logits), int(full.logits.argmax()) == int(logits.argmax())
                del full
                self._take_in(kl, agrees, ratio)
            except Exception as error:  # whatever it is, such as memory that is short, the watch goes on
                with self._changed:
                    self._failed, self._error = self._failed + 1, f"{type(error).__name__}: {error}"
                logger.warning("a request could not be compared with full prefill: %s", error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _take_in(self, kl: float, agrees: bool, ratio: float) -> None:
        with self._changed:
            if self._ratio is not None and ratio < self._ratio:
                return  # from before the ratio was raised
            self._last.append((kl, agrees))
            self._compared += 1
            mean = sum(one for one, _ in self._last) / len(self._last)
            self._sustained = len(self._last) == self.settings.window and mean > self.settings.limit
            if not self._sustained:
                return
            if self.settings.answer == "full":
                self._in_full = True
            elif self.settings.answer == "raise":
                self._raise()
                self._last.clear()  # the next judgement is on requests at the new ratio

    def _raise(self) -> None:
        ratio = 2 * max(self._ratio or 0.0, self._asked)
        if not 0 < ratio <= MOST_RATIO:
            self._in_full = True
        else:
            self._ratio = ratio
