"""Engines with a method that the tests name: it reads one cache of each passage and always fuses.

The default method reads two caches of a passage and refuses to fuse prompts as short as most tests', so counts would be
twice what a test is about, and depend on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qcfuse_rag import FusionEngine, KVStore, LanguageModel, MemoryStore, Method, make_method
from qcfuse_rag.fusion.lookup import Lookups, plan_lookups
from qcfuse_rag.fusion.state import AdaptedChunk
from qcfuse_rag.prompts.segments import Prompt, Span
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.store.backends.base import Miss
from qcfuse_rag.store.key import BLIND, FRAMED
from tests.support.passages import PASSAGES

METHOD = make_method("qcfuse", ratio=0.15, base=FRAMED)
METHOD_OPTIONS = ("--method", "qcfuse", "--ratio", "0.15")
"""The same method on the command line."""


def make_warmed_engine(lm: LanguageModel) -> FusionEngine:
    """Return an engine over a store with the test passages, blind and framed."""
    engine = make_engine(lm, MemoryStore())
    engine.warm(PASSAGES, bases=(BLIND, FRAMED))
    return engine


def make_engine(lm: LanguageModel, store: KVStore, **options: Any) -> FusionEngine:
    """Return an engine with `METHOD`, unless the options name another."""
    return FusionEngine(lm, store, **{"method": METHOD, **options})


def look_up(
    lm: LanguageModel, store: KVStore, prompt: Prompt, method: Method
) -> Sequence[tuple[Span, AdaptedChunk | Miss]]:
    """Plan what to read and read it at once, however long it takes."""
    return Lookups(plan_lookups(lm, store, prompt, method, priced=False), WaitBudget(None)).outcomes()
