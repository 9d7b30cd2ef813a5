"""Warn about ignored settings and unstored passages at the caller's line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable

from qcfuse_rag.errors import NotStored, UnusedSetting
from qcfuse_rag.ingestion.warm_job import WarmSummary

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
"""Packages that may stand on the stack between the caller and this module."""


def warn_unused(given: Iterable[str], used: Collection[str]) -> None:
    """Warn of keyword arguments that a call ignores; frameworks pass on any argument.

    Args:
        given: names of the call's keyword arguments.
        used: names that the call reads.
    """
    unused = sorted(set(given).difference(used))
    if unused:
        warn_caller(f"{', '.join(unused)}: no effect here; a call takes {', '.join(used)}")


def warn_not_stored(summary: WarmSummary) -> None:
    """Warn of passages that a warming job could not store, where nothing reads its summary."""
    if summary.failed:
        _, reason = summary.failed[0]
        warn_caller(f"{len(summary.failed)} passages were not stored, the first because of: {reason}", NotStored)
    if summary.left_out:
        warn_caller(f"{summary.left_out} caches were not stored: the store has no room for them", NotStored)


def warn_caller(message: str, category: type[Warning] = UnusedSetting) -> None:
    """Warn at the innermost line outside of `FRAMEWORKS`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in FRAMEWORKS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
