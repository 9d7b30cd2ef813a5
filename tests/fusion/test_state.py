"""Parts of chunks in a fused prompt: only a part that begins the chunk can be exact."""

from __future__ import annotations

import pytest

from qcfuse_rag import LanguageModel, MemoryStore, make_method
from qcfuse_rag.fusion.state import FusedPrompt
from qcfuse_rag.prompts.segments import ChunkPart, Prompt, Role, Segment
from qcfuse_rag.runtime.loading.layer_loader import WaitBudget
from qcfuse_rag.store.key import FRAMED
from tests.support.engines import look_up, make_engine
from tests.support.passages import PASSAGES


@pytest.mark.parametrize("start", [0, 3])
def test_a_part_behind_the_system_prefix_is_exact_only_from_its_first_token(llama: LanguageModel, start: int) -> None:
    engine = make_engine(llama, MemoryStore())
    engine.warm(PASSAGES[:1], bases=(FRAMED,))
    prefix_ids, ids = engine.prompts.prefix_ids, engine.prompts.chunk_ids(PASSAGES[0])
    segments = (
        Segment(Role.SYSTEM_PREFIX, prefix_ids, ""),
        Segment(Role.CHUNK, ids[start:], "", ChunkPart(ids, start)),
        Segment(Role.QUESTION, ids[:4], ""),
    )
    prompt = Prompt(segments, prefix_ids=prefix_ids)
    fused = FusedPrompt.empty(engine.runner, prompt, len(prompt))
    fused.load(look_up(engine.lm, engine.store, prompt, make_method("reuse", base=FRAMED)), WaitBudget(None))
    fused.await_all()
    assert [placed.exact for placed in fused.placed_chunks] == [start == 0]
