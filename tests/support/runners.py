"""Runners for tests."""

from __future__ import annotations

from collections.abc import Callable

from qcfuse_rag.runtime.cost import Costs
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.base import KVStore


def loading_first(lm: LanguageModel, store: KVStore, *, costs: Callable[[], Costs] | None = None) -> ModelRunner:
    """Return a runner that loads everything before it computes: the reference of loading while computing."""
    runner = ModelRunner(lm, store, load_limit_s=None, overlap=False)
    if costs is not None:
        runner.costs = lambda *_: costs()  # type: ignore[assignment]
    return runner
