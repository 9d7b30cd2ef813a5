"""What comes to nothing, a setting or a passage: whoever gave it is told, at the line where it was given."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable

from qcfuse_rag.errors import NotStored, UnusedSetting
from qcfuse_rag.ingestion.summary import WarmSummary

FRAMEWORKS = (
    "qcfuse_rag",
    "langchain_qcfuse",
    "langchain_core",
    "langchain",
    "langgraph",
    "llama_index",
    "llama_index_instrumentation",
    "pydantic",
    "wrapt",
)
"""Packages between whoever gives a setting and whoever reads it."""


def warn_unused(given: Iterable[str], used: Collection[str]) -> None:
    """Warn of a call's keyword arguments that nothing reads: a framework hands on whatever it is given."""
    unused = sorted(set(given).difference(used))
    if unused:
        warn_caller(f"{', '.join(unused)}: no effect here; a call takes {', '.join(used)}")


def warn_not_stored(summary: WarmSummary) -> None:
    """Warn of passages that a warming job could not store, where nobody looks at its summary."""
    if summary.failed:
        _, reason = summary.failed[0]
        warn_caller(f"{len(summary.failed)} passages were not stored, the first because of: {reason}", NotStored)
    if summary.left_out:
        warn_caller(f"{summary.left_out} caches were not stored: the store has no room for them", NotStored)


def warn_caller(said: str, category: type[Warning] = UnusedSetting) -> None:
    """Warn at the line outside of frameworks that gave what the warning is about."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in FRAMEWORKS:
        frame, level = frame.f_back, level + 1
    warnings.warn(said, category, stacklevel=level)
