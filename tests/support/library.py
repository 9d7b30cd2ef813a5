"""A library of four passages, and which of them are stored."""

from __future__ import annotations

from qcfuse_rag import FusionEngine
from tests.support.passages import PASSAGES

FERRY, HULL, MILL = PASSAGES
HARBOUR = "The harbour master lives above the bakery. She reads the tide tables aloud at noon to whoever asks."


def stored(engine: FusionEngine) -> set[str]:
    """Return which passages' caches are in the store."""
    base = engine.method.base
    assert base is not None
    keys = {
        text: engine.corpus.keys(engine.prompts.chunk_ids(text), [base])[0] for text in (FERRY, HULL, MILL, HARBOUR)
    }
    return {text for text, key in keys.items() if key in engine.store}
