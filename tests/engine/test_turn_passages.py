"""Warmed passages in any turn: found where they stand, fused there, and part of the beginning of the next turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, Method, Prompt, SamplingParams, make_method
from qcfuse_rag.errors import StoreError
from qcfuse_rag.prompts.recognition import UNSOUGHT, RecognitionIndex
from qcfuse_rag.prompts.template import Turn
from qcfuse_rag.store.key import FRAMED
from tests.support import references
from tests.support.engines import METHOD, make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION

PARAMS = SamplingParams(max_new_tokens=5)
HELLO: list[Turn] = [("user", "Hello."), ("assistant", "Hello!")]
OPENING = 8
"""Most tokens at the end of a prompt that the next turn writes in another way: the opening of the answer."""

Build = Callable[[FusionEngine, list[Turn]], Prompt]
"""Builds the prompt of a conversation that goes on with these turns."""


def told(before: str) -> Turn:
    return "user", f"Read this: {before}\n\nIs that so?"


def earlier_question(engine: FusionEngine, turns: list[Turn]) -> Prompt:
    return engine.prompt_from_text([told(PASSAGES[0]), ("assistant", "Yes."), ("user", QUESTION), *turns])


def tool_result(engine: FusionEngine, turns: list[Turn]) -> Prompt:
    return engine.prompt_from_text([*HELLO, ("user", QUESTION), ("tool", PASSAGES[0]), *turns])


def context_last(engine: FusionEngine, turns: list[Turn]) -> Prompt:
    return engine.prompt_from_text([*HELLO, ("user", f"{QUESTION}\n\n<context>{PASSAGES[0]}</context>"), *turns])


def history_beside_documents(engine: FusionEngine, turns: list[Turn]) -> Prompt:
    return engine.prompt(QUESTION, PASSAGES[1:], [told(PASSAGES[0]), ("assistant", "Yes.")], later=turns)


def tool_result_behind_documents(engine: FusionEngine, turns: list[Turn]) -> Prompt:
    return engine.prompt(QUESTION, PASSAGES[1:], HELLO, later=[("assistant", "?"), ("tool", PASSAGES[0]), *turns])


FORMS = [earlier_question, tool_result, context_last, history_beside_documents, tool_result_behind_documents]
pytestmark = pytest.mark.parametrize("build", FORMS, ids=lambda build: build.__name__)


@pytest.fixture
def keeping(llama: LanguageModel) -> FusionEngine:
    return make_engine(llama, MemoryStore(), prefix_bytes=1 << 30)


def passage_of_the_turn(prompt: Prompt) -> tuple[int, int]:
    """Return where the first passage stands, as far as its tokens are the warmed ones."""
    (span,) = [span for span in prompt.chunks if span.segment.text.strip() in PASSAGES[0]]
    assert len(span.segment.text) > 0.9 * len(PASSAGES[0]), "all but the edges"
    return span.start, span.stop


def test_a_passage_is_found_in_its_turn_and_changes_no_token(keeping: FusionEngine, build: Build) -> None:
    before = build(keeping, [])
    keeping.warm(PASSAGES)
    prompt = build(keeping, [])
    assert prompt.ids == before.ids
    start, stop = passage_of_the_turn(prompt)
    report = keeping.generate(prompt, PARAMS).report
    (lookup,) = [lookup for lookup in report.lookups if lookup.start == start]
    assert (lookup.hit, lookup.tokens, lookup.role) == (True, stop - start, "chunk")
    recomputed = sum(start <= position < stop for position in report.selected)
    assert recomputed < stop - start, "the others come from the store"


@pytest.mark.parametrize("method", [METHOD, make_method("full")], ids=["fused", "full"])
def test_the_next_turn_begins_with_it(llama: LanguageModel, build: Build, method: Method) -> None:
    keeping = make_warmed_engine(llama, method=method, bases=[FRAMED], prefix_bytes=1 << 30)
    first = build(keeping, [])
    answer = keeping.generate(first, PARAMS)
    following = build(keeping, [("assistant", answer.text), ("user", "And why?")])
    found = keeping.generate(following, PARAMS)
    start, stop = passage_of_the_turn(following)
    assert (start, stop) == passage_of_the_turn(first), "it stays in its turn"
    assert len(following) > found.report.prefix_tokens >= len(first) - OPENING > stop
    assert not any(start <= position < stop for position in found.report.selected)
    if method.base is None:
        plain = make_engine(keeping.lm, keeping.store, method=method)
        assert found.ids == plain.generate(following, PARAMS).ids


def test_every_row_computed_is_full_prefill(keeping: FusionEngine, build: Build) -> None:
    keeping.warm(PASSAGES)
    prompt = build(keeping, [])
    done = keeping.prefill(prompt, method=make_method("random", ratio=1.0))
    assert done.report.context_tokens > 0
    expected = references.plain_forward(keeping.lm, prompt.ids)[0][-1]
    assert torch.allclose(done.logits, expected, atol=1e-4)


def test_without_the_record_of_passages_turns_are_computed_and_the_report_says_why(
    keeping: FusionEngine, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping.warm(PASSAGES)
    expected = build(keeping, [])

    def fail(self: RecognitionIndex, *text: object) -> None:
        raise StoreError("the record cannot be read")

    monkeypatch.setattr(RecognitionIndex, "find", fail)
    prompt = build(keeping, [])
    assert prompt.ids == expected.ids
    assert len(prompt.chunks) == len(expected.chunks) - 1
    report = keeping.generate(prompt, PARAMS).report
    assert f"{UNSOUGHT}: the record cannot be read" in (report.fallback or "")
