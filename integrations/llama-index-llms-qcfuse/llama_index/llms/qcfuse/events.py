"""Events for LlamaIndex's instrumentation."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events import BaseEvent

from qcfuse_rag.integrations import RequestHandle

dispatcher = get_dispatcher(__name__)


class FusionEndEvent(BaseEvent):
    """A fused prefill has finished.

    Attributes:
        report: `FusionReport.to_dict()`: method, rows, hits, bytes, seconds, and the reason for a fallback.
    """

    report: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Return the event's name."""
        return "FusionEndEvent"


def finish(answer: RequestHandle) -> None:
    """Cancel a request that is still running, and emit a `FusionEndEvent` if it was prefilled."""
    answer.cancel()
    if answer.report is not None:
        dispatcher.event(FusionEndEvent(report=answer.report.to_dict()))
