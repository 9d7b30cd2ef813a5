"""Instrumentation events."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events import BaseEvent


class FusionEndEvent(BaseEvent):
    """A fused prefill has finished.

    Attributes:
        report: `FusionReport.to_dict()`: method, rows, hits, bytes, seconds, and why a fallback was taken.
    """

    report: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Return the event's name."""
        return "FusionEndEvent"
