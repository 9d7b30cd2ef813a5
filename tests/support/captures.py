"""Captured passages: how tests make and find them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qcfuse_rag import FusionEngine
from qcfuse_rag.methods.captures.job import CaptureSummary
from qcfuse_rag.methods.captures.job import capture as capture_groups
from qcfuse_rag.methods.captures.slots import Slot, SlotKind, filled_slots


def capture(engine: FusionEngine, groups: Iterable[Sequence[str]], **options: Any) -> CaptureSummary:
    """Capture groups of passages into an engine's store."""
    return capture_groups(engine.corpus.entry_writer(), groups, **options)


def slots_of(engine: FusionEngine, text: str, kind: SlotKind = "variant", slots: int = 20) -> list[Slot]:
    """Return the slots of a passage that have an entry."""
    ids = engine.prompts.chunk_ids(text)
    return filled_slots(engine.store, kind, slots, engine.lm.fingerprint, engine.prompts.prefix_ids, ids)
