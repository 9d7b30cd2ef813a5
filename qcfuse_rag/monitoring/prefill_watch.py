"""Watch an engine's prefills by shadow mode and by observers of their reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.fusion.report import FusionReport
from qcfuse_rag.monitoring.shadow import InFlight, Shadow, ShadowSettings
from qcfuse_rag.runtime.runner import ModelRunner

LOG = logging.getLogger(__name__)

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
