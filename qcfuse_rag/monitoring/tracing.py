"""Fused prefills as OpenTelemetry spans: one for the whole, one for each stage, in the trace of whoever asked."""

from __future__ import annotations

import time

from qcfuse_rag.fusion.report import FusionReport

try:
    from opentelemetry import trace
    from opentelemetry.trace import Status, StatusCode, TracerProvider
except ImportError as error:
    raise ImportError("spans need OpenTelemetry: run `pip install 'qcfuse-rag[telemetry]'`") from error

NANOSECONDS = 1_000_000_000


class Spans:
    """An observer of an engine: `engine.observe(Spans())`.

    A span ends when the report is made. Stages are laid one behind the other, though loading goes on beside the others:
    what is shown of it is the waiting. A fallback is an event, not an error: the answer is right.

    Args:
        provider: of tracers; the process's own if None.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("qcfuse_rag", tracer_provider=provider)

    def __call__(self, report: FusionReport) -> None:
        """Record one prefill."""
        end = time.time_ns()
        taken = {stage: int(seconds * NANOSECONDS) for stage, seconds in report.timings.stages.items()}
        start = end - sum(taken.values())
        whole = self._tracer.start_span("qcfuse.prefill", start_time=start, attributes=attributes(report))
        if report.fallback is not None:
            whole.add_event("qcfuse.fallback", {"reason": report.fallback}, timestamp=end)
        inside = trace.set_span_in_context(whole)
        for stage, duration in taken.items():
            span = self._tracer.start_span(f"qcfuse.{stage}", context=inside, start_time=start)
            start += duration
            span.end(start)
        whole.set_status(Status(StatusCode.OK))
        whole.end(end)


def attributes(report: FusionReport) -> dict[str, str | int | float]:
    """Return what a span says of a prefill; nothing of what was asked."""
    chunks = [lookup for lookup in report.lookups if lookup.role == "chunk"]
    return {
        "qcfuse.method": report.method,
        "qcfuse.base": report.base or "",
        "qcfuse.ratio": report.ratio,
        "qcfuse.prompt_tokens": report.prompt_tokens,
        "qcfuse.reused_tokens": report.reused_tokens,
        "qcfuse.recomputed_tokens": len(report.selected),
        "qcfuse.rows": report.rows,
        "qcfuse.work": report.work,
        "qcfuse.hits": sum(lookup.hit for lookup in chunks),
        "qcfuse.misses": sum(not lookup.hit for lookup in chunks),
        "qcfuse.bytes_loaded": report.bytes_loaded,
    }
