"""Reports as spans and metrics, in the caller's trace and without the question's text."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from qcfuse_rag import FusionEngine, FusionReport, SamplingParams, make_method
from qcfuse_rag.engine.scheduler import EngineHandle
from qcfuse_rag.monitoring.metrics import Metrics
from qcfuse_rag.monitoring.tracing import Spans
from qcfuse_rag.store.key import FRAMED
from tests.support.passages import PASSAGES, QUESTION

STAGES = ("load", "probe", "select", "recompute")
METHOD = make_method("qcfuse", ratio=0.3, base=FRAMED)


@pytest.fixture
def engine(engine: FusionEngine) -> FusionEngine:
    engine.method = METHOD
    engine.warm(PASSAGES[:2])
    return engine


@pytest.fixture
def exported() -> tuple[TracerProvider, InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


@pytest.mark.parametrize(("missing", "module"), [("prometheus_client", "metrics"), ("opentelemetry", "tracing")])
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(
    missing: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"qcfuse_rag.monitoring.{module}")
    with pytest.raises(ImportError, match=r"qcfuse-rag\[telemetry\]"):
        importlib.import_module(f"qcfuse_rag.monitoring.{module}")


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_prefill_is_a_span_with_its_stages_inside(
    engine: FusionEngine, exported: tuple[TracerProvider, InMemorySpanExporter]
) -> None:
    provider, exporter = exported
    engine.observe(Spans(provider))
    report = engine.prefill(engine.prompt(QUESTION, PASSAGES)).report
    spans = by_name(exporter)
    assert set(spans) == {"qcfuse.prefill", *(f"qcfuse.{stage}" for stage in STAGES)}
    whole = spans["qcfuse.prefill"]
    assert whole.attributes is not None
    assert whole.attributes["qcfuse.hits"] == 2
    assert whole.attributes["qcfuse.misses"] == 1
    assert whole.attributes["qcfuse.reused_tokens"] == report.reused_tokens
    assert whole.start_time is not None
    assert whole.end_time is not None
    assert (whole.end_time - whole.start_time) / 1e9 == pytest.approx(report.timings.ttft_s, abs=1e-6)
    at = whole.start_time
    for stage in STAGES:
        span = spans[f"qcfuse.{stage}"]
        assert span.parent is not None
        assert span.parent.span_id == whole.context.span_id
        assert span.start_time == at
        at = span.end_time or 0
    [event] = whole.events
    assert event.attributes == {"reason": "1 of 3 passages computed in full: absent"}
    assert QUESTION not in whole.to_json()


async def test_it_belongs_to_the_trace_of_whoever_asked(
    engine: FusionEngine, exported: tuple[TracerProvider, InMemorySpanExporter]
) -> None:
    provider, exporter = exported
    engine.observe(Spans(provider))
    tracer, served = provider.get_tracer("test"), EngineHandle.wrap(engine)
    params = SamplingParams(max_new_tokens=2)

    async def ask(number: int) -> None:
        with tracer.start_as_current_span(f"request {number}"):
            answer = await served.asubmit(lambda engine: (engine.prompt(QUESTION, PASSAGES), params))
            await answer.aresult()

    await asyncio.gather(*(ask(number) for number in range(3)))
    served.close()
    finished = exporter.get_finished_spans()
    requests = {span.context.span_id for span in finished if span.name.startswith("request")}
    prefills = [span for span in finished if span.name == "qcfuse.prefill"]
    assert {span.parent.span_id for span in prefills if span.parent} == requests
    assert len(prefills) == 3


def test_metrics_count_what_reports_say(engine: FusionEngine) -> None:
    registry = CollectorRegistry()
    engine.observe(Metrics(registry))
    reports = [engine.prefill(engine.prompt(QUESTION, PASSAGES)).report for _ in range(2)]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("qcfuse_prefills_total", method="qcfuse") == 2
    assert value("qcfuse_fallbacks_total", method="qcfuse") == 2
    assert value("qcfuse_lookups_total", outcome="hit") == 4
    assert value("qcfuse_lookups_total", outcome="miss") == 2
    outcomes = [
        value("qcfuse_prompt_tokens_total", outcome=outcome)
        for outcome in ("reused", "recomputed", "computed", "prefix")
    ]
    assert outcomes[:2] == [sum(r.reused_tokens for r in reports), sum(len(r.selected) for r in reports)]
    assert sum(count or 0 for count in outcomes) == sum(report.prompt_tokens for report in reports)
    assert value("qcfuse_loaded_bytes_total") == sum(report.bytes_loaded for report in reports)
    taken = value("qcfuse_stage_seconds_sum", stage="ttft")
    assert taken == pytest.approx(sum(report.timings.ttft_s for report in reports))
    assert value("qcfuse_work_ratio_count", method="qcfuse") == 2
    text = generate_latest(registry).decode()
    assert not any(word in text for word in ("ferry", "paint", "Orla"))


def test_an_observer_that_fails_costs_a_line_in_the_log(engine: FusionEngine, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[FusionReport] = []

    def broken(report: FusionReport) -> None:
        raise RuntimeError("no collector")

    engine.observe(broken)
    engine.observe(seen.append)
    with caplog.at_level(logging.ERROR):
        done = engine.prefill(engine.prompt(QUESTION, PASSAGES))
    assert seen == [done.report]
    assert "an observer of fused prefills failed" in caplog.text
