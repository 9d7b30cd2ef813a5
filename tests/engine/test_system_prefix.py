"""System prefixes of conversations: stored once for a system message and a set of tools, exact wherever they begin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qcfuse_rag import (
    DiskStore,
    FusionEngine,
    LanguageModel,
    MemoryStore,
    Prompt,
    PromptTemplate,
    SamplingParams,
    make_method,
)
from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.fusion.prefix_cache import common_length
from qcfuse_rag.prompts.segments import Role
from qcfuse_rag.prompts.template import Turn
from qcfuse_rag.store.key import FRAMED
from tests.support import references
from tests.support.families import build_model, build_tokenizer
from tests.support.passages import PASSAGES, QUESTION
from tests.support.tool_templates import LOOK_UP, MOOR, TEMPLATES, teach

TOOLS = [LOOK_UP, MOOR]
SYSTEM = "You look after the boats of a small harbour and answer in one sentence."
CONVERSATION: list[Turn] = [("system", SYSTEM), ("user", QUESTION), ("assistant", "It is old."), ("user", "How old?")]
METHOD = make_method("qcfuse", ratio=0.3, base=FRAMED)


def taught_model(way: str) -> LanguageModel:
    model = build_model("llama", max_position_embeddings=2048)
    return LanguageModel.wrap(model, teach(build_tokenizer(lambda: [*PASSAGES, QUESTION]), way))


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    """A tiny model with each of the chat templates that show tools."""
    return taught_model(request.param)


@pytest.fixture
def engine(lm: LanguageModel) -> FusionEngine:
    return FusionEngine(lm, MemoryStore(), method=METHOD)


def prompts(engine: FusionEngine) -> list[Prompt]:
    """The prompts of an agent's conversation: as it is, with passages beside it, and with passages in it."""
    told: list[Turn] = [*CONVERSATION[:-1], ("user", f"{PASSAGES[0]}\n\nHow old?")]
    return [
        engine.prompt_from_text(CONVERSATION, TOOLS),
        engine.prompt_from_text(told, TOOLS),
        engine.prompt("How old?", PASSAGES, CONVERSATION[:-1], TOOLS),
        engine.prompt("How old?", PASSAGES, CONVERSATION[:1], TOOLS),
    ]


def test_marking_a_prefix_changes_no_token(engine: FusionEngine) -> None:
    before = prompts(engine)
    engine.warm(PASSAGES)
    engine.warm_prefix(SYSTEM, TOOLS)
    after = prompts(engine)
    assert [prompt.ids for prompt in after] == [prompt.ids for prompt in before]
    for old, new in zip(before, after, strict=True):
        assert (old.segments[0].role, new.segments[0].role) == (Role.TEXT, Role.SYSTEM_PREFIX)
        assert "".join(part.text for part in new.segments) == "".join(part.text for part in old.segments)


def test_a_stored_prefix_is_exact_and_holds_system_message_and_tools(engine: FusionEngine) -> None:
    first, second = engine.warm_prefix(SYSTEM, TOOLS), engine.warm_prefix(SYSTEM, TOOLS)
    assert (second.warmed, second.present) == (0, first.warmed + first.present)
    assert first.warmed > 0
    for prompt in prompts(engine):
        done = engine.prefill(prompt)
        prefix = done.report.lookups[0]
        assert (prefix.role, prefix.hit, prefix.exact) == ("system_prefix", True, True)
        text = prompt.segments[0].text
        assert SYSTEM[:-1] in text or "description" in text  # a template may print tools before or after
        assert all(tool["function"]["description"] in text for tool in TOOLS)
        if prompt.chunks:
            done = engine.prefill(prompt, method=make_method("random", ratio=1.0))
        else:
            assert done.report.rows == len(prompt) - len(prompt.segments[0].ids)
        assert torch.allclose(done.logits, references.plain_forward(engine.lm, prompt.ids)[0][-1], atol=1e-4)


@pytest.mark.parametrize(
    ("system", "tools"),
    [(SYSTEM, [MOOR, LOOK_UP]), (SYSTEM, [LOOK_UP]), ("Be brief, whatever you are asked here.", TOOLS), (None, TOOLS)],
)
def test_another_system_message_or_set_of_tools_is_another_prefix(
    engine: FusionEngine, system: str | None, tools: Sequence[Any]
) -> None:
    engine.warm_prefix(SYSTEM, TOOLS)
    turns: list[Turn] = [("user", QUESTION)] if system is None else [("system", system), ("user", QUESTION)]
    assert engine.prompt_from_text(turns, tools).segments[0].role is Role.TEXT


def test_another_engine_finds_the_prefix_on_disk_and_computes_a_damaged_one(lm: LanguageModel, tmp_path: Path) -> None:
    with FusionEngine(lm, DiskStore(tmp_path), method=METHOD) as engine:
        engine.warm_prefix(SYSTEM, TOOLS)
    with DiskStore(tmp_path) as store, FusionEngine(lm, store, method=METHOD) as engine:
        prompt = engine.prompt_from_text(CONVERSATION, TOOLS)
        assert engine.prefill(prompt).report.lookups[0].hit
        for entry in list(store.entries()):
            path = store.files.path(entry.address)
            path.write_bytes(path.read_bytes()[:-64])
        done = engine.prefill(prompt)
        assert not done.report.lookups[0].hit
        assert done.report.lookups[0].reason
        assert torch.allclose(done.logits, references.plain_forward(lm, prompt.ids)[0][-1], atol=1e-4)


def test_the_next_turn_reuses_the_whole_turn_before_rather_than_the_stored_prefix(lm: LanguageModel) -> None:
    engine = FusionEngine(lm, MemoryStore(), method=METHOD, prefix_bytes=1 << 26)
    engine.warm_prefix(SYSTEM, TOOLS)
    first = engine.prompt_from_text(CONVERSATION[:2], TOOLS)
    engine.generate(first, SamplingParams(max_new_tokens=2))
    report = engine.generate(engine.prompt_from_text(CONVERSATION, TOOLS), SamplingParams(max_new_tokens=2)).report
    assert report.prefix_tokens > len(first.segments[0].ids)


def test_a_set_of_tools_reuses_those_that_it_begins_with(lm: LanguageModel) -> None:
    engine = FusionEngine(lm, MemoryStore(), method=METHOD, prefix_bytes=1 << 26)
    engine.warm_prefix(SYSTEM, [LOOK_UP])
    fewer = engine.prompt_from_text(CONVERSATION[:2], [LOOK_UP])
    engine.generate(fewer, SamplingParams(max_new_tokens=2))

    more = engine.prompt_from_text(CONVERSATION[:2], TOOLS)
    done = engine.generate(more, SamplingParams(max_new_tokens=2))
    reused = engine.lm.tokenizer.decode(list(more.ids[: done.report.prefix_tokens]))
    assert LOOK_UP["function"]["description"] in reused
    assert done.report.prefix_tokens == common_length(np.array(fewer.ids), np.array(more.ids))
    plain = FusionEngine(lm, MemoryStore(), method=make_method("full"))
    assert done.text == plain.generate(more, SamplingParams(max_new_tokens=2)).text


def test_a_template_without_tools_refuses_to_warm_them(llama: LanguageModel) -> None:
    engine = FusionEngine(llama, MemoryStore())
    with pytest.raises(InvalidTemplate, match="no place for tools"):
        engine.warm_prefix(SYSTEM, TOOLS)


def test_the_system_message_of_a_chat_without_tools_is_a_prefix_too(llama: LanguageModel) -> None:
    engine = FusionEngine(llama, MemoryStore(), method=METHOD)
    engine.warm_prefix(SYSTEM)
    prefix, *_ = engine.prompt_from_text(CONVERSATION).segments
    assert prefix.role is Role.SYSTEM_PREFIX
    assert SYSTEM in prefix.text


def test_a_beginning_that_is_too_short_to_be_read_is_not_stored(llama: LanguageModel) -> None:
    engine = FusionEngine(llama, MemoryStore(), template=PromptTemplate(messages=(("user", "{context}{question}"),)))
    assert engine.warm_prefix().chunks == 0


def test_a_passage_in_a_system_message_stays_a_chunk_that_can_be_forgotten(engine: FusionEngine) -> None:
    engine.warm(PASSAGES)
    system = f"{SYSTEM}\n\n{PASSAGES[0]}"
    engine.warm_prefix(system, TOOLS)
    prompt = engine.prompt_from_text([("system", system), ("user", QUESTION)], TOOLS)
    assert [segment.role for segment in prompt.segments[:2]] == [Role.SYSTEM_PREFIX, Role.CHUNK]
    assert PASSAGES[0][:40] in prompt.segments[1].text


def test_an_absent_prefix_is_not_sought_each_time_but_found_once_it_is_warmed(lm: LanguageModel) -> None:
    asked: list[str] = []

    class Counting(MemoryStore):
        def __contains__(self, key: Any) -> bool:
            asked.append(str(key))
            return super().__contains__(key)

    engine = FusionEngine(lm, Counting(), method=METHOD)
    for _ in range(3):
        engine.prompt_from_text(CONVERSATION, TOOLS)
    assert len(asked) == 1
    engine.warm_prefix(SYSTEM, TOOLS)
    assert engine.prompt_from_text(CONVERSATION, TOOLS).segments[0].role is Role.SYSTEM_PREFIX
