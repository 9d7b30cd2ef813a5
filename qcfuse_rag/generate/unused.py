"""Settings that nothing reads: whoever gave one is told, at the line where it was given."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable

from qcfuse_rag.errors import UnusedSetting

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


def warn_caller(said: str) -> None:
    """Warn of a setting without effect, at the line outside of frameworks that gave it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in FRAMEWORKS:
        frame, level = frame.f_back, level + 1
    warnings.warn(said, UnusedSetting, stacklevel=level)
