"""Export fused prefills as Prometheus metrics."""

from __future__ import annotations

from typing import Any

from qcfuse_rag.fusion.report import FusionReport

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
except ImportError as error:
    raise ImportError("metrics need prometheus-client: run `pip install 'qcfuse-rag[telemetry]'`") from error

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


class Metrics:
    """An observer of an engine: `engine.observe(Metrics())`.

    One instance per registry serves any number of engines. The labels, such as method and stage, have a bounded number
    of values and contain nothing of a question or a document. A registry that contains the metrics already raises
    `ValueError`.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        shared: dict[str, Any] = {"registry": registry}
        self._requests = Counter("qcfuse_prefills", "Prompts brought to their first token", ["method"], **shared)
        self._fallbacks = Counter("qcfuse_fallbacks", "Prompts not fused as asked, with a reason", ["method"], **shared)
        self._lookups = Counter("qcfuse_lookups", "Passages looked up", ["outcome"], **shared)
        self._tokens = Counter("qcfuse_prompt_tokens", "Tokens of prompts, by outcome", ["outcome"], **shared)
        self._bytes = Counter("qcfuse_loaded_bytes", "Bytes read from the store", **shared)
        self._seconds = Histogram(
            "qcfuse_stage_seconds", "Time to first token, by stage", ["stage"], buckets=SECONDS, **shared
        )
        self._work = Histogram(
            "qcfuse_work_ratio", "Rows computed as a share of full prefill's", ["method"], buckets=SHARES, **shared
        )

    def __call__(self, report: FusionReport) -> None:
        """Count one prefill."""
        self._requests.labels(report.method).inc()
        if report.fallback is not None:
            self._fallbacks.labels(report.method).inc()
        for lookup in report.lookups:
            if lookup.role == "chunk":
                self._lookups.labels("hit" if lookup.hit else "miss").inc()
        recomputed = len(report.selected)
        self._tokens.labels("reused").inc(report.reused_tokens - report.prefix_tokens)
        self._tokens.labels("prefix").inc(report.prefix_tokens)
        self._tokens.labels("recomputed").inc(recomputed)
        self._tokens.labels("computed").inc(report.prompt_tokens - report.reused_tokens - recomputed)
        self._bytes.inc(report.bytes_loaded)
        for stage, seconds in (report.timings.stages | {"ttft": report.timings.ttft_s}).items():
            self._seconds.labels(stage).observe(seconds)
        self._work.labels(report.method).observe(report.work)
