"""Export fused prefills as OpenTelemetry spans: one for the prefill and one for each stage, in the caller's trace."""

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

    The prefill's span ends when its report is made. The stages' spans follow each other. Loading overlaps the other
    stages, so its span shows only the time spent waiting for it. A fallback is an event, not an error, because the
    answer is still right.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("qcfuse_rag", tracer_provider=provider)

    def __call__(self, report: FusionReport) -> None:
        """Record one prefill."""
        end = time.time_ns()
        durations = {stage: int(seconds * NANOSECONDS) for stage, seconds in report.timings.stages.items()}
        start = end - sum(durations.values())
        prefill_span = self._tracer.start_span("qcfuse.prefill", start_time=start, attributes=attributes(report))
        if report.fallback is not None:
            prefill_span.add_event("qcfuse.fallback", {"reason": report.fallback}, timestamp=end)
        context = trace.set_span_in_context(prefill_span)
        for stage, duration in durations.items():
            stage_span = self._tracer.start_span(f"qcfuse.{stage}", context=context, start_time=start)
            start += duration
            stage_span.end(start)
        prefill_span.set_status(Status(StatusCode.OK))
        prefill_span.end(end)


def attributes(report: FusionReport) -> dict[str, str | int | float]:
    """Return the attributes of a prefill's span, with nothing of the question or the passages."""
    chunks = [lookup for lookup in report.lookups if lookup.role == "chunk"]
    return {
        "qcfuse.method": report.method,
        "qcfuse.base": report.base or "",
        "qcfuse.ratio": report.ratio,
        "qcfuse.prompt_tokens": report.prompt_tokens,
        "qcfuse.reused_tokens": report.reused_tokens,
        "qcfuse.prefix_tokens": report.prefix_tokens,
        "qcfuse.recomputed_tokens": len(report.selected),
        "qcfuse.rows": report.rows,
        "qcfuse.work": report.work,
        "qcfuse.hits": sum(lookup.hit for lookup in chunks),
        "qcfuse.misses": sum(not lookup.hit for lookup in chunks),
        "qcfuse.bytes_loaded": report.bytes_loaded,
    }
