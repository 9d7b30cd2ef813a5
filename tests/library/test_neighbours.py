"""Passages that were retrieved together, as the log says, are neighbours."""

from __future__ import annotations

from qcfuse_rag import FusionEngine
from qcfuse_rag.methods.captures.slots import context_of
from qcfuse_rag.methods.fusionrag import ENRICHED
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import hash_ids
from tests.support.passages import PASSAGES


def test_passages_retrieved_together_are_neighbours_before_similar_ones(engine: FusionEngine) -> None:
    """Only passages that all its readers may read are neighbours, whatever was retrieved together."""
    ids = [engine.prompts.chunk_ids(text) for text in PASSAGES]
    names = [hash_ids(chunk) for chunk in ids]

    def neighbours_of(index: int) -> tuple[str, ...]:
        chunk = engine.store.get(engine.corpus.keys(ids[index], (ENRICHED,))[0])
        assert isinstance(chunk, ChunkKV)
        context = context_of(chunk)
        assert context is not None
        return context

    engine.warm(PASSAGES, bases=(ENRICHED,))
    similar = neighbours_of(0)
    assert set(similar) == {names[1], names[2]}
    last = names.index(similar[-1])
    engine.store.clear()
    engine.warm(PASSAGES, bases=(ENRICHED,), retrievals=[[0, last], [last, 0, 0], [1, 2]])
    assert neighbours_of(0) == (similar[1], similar[0])
    engine.store.clear()
    sources = ["a", "b", "c"]
    engine.warm(
        PASSAGES, bases=(ENRICHED,), sources=sources, access={sources[last]: "board"}, retrievals=[[0, last]] * 3
    )
    assert neighbours_of(0) == (similar[0],)
