"""Variables of the chat template in an engine: what is warmed with them, and what is reused under others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcfuse_rag import FusionEngine, MemoryStore, PromptTemplate, make_method
from qcfuse_rag.errors import InvalidTemplate
from qcfuse_rag.prompts.segments import Prompt
from qcfuse_rag.store.key import FRAMED
from tests.support.engines import make_engine, make_warmed_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.references import plain_forward
from tests.support.thinking import thinking_model

METHOD = make_method("qcfuse", ratio=1.0, base=FRAMED)


@pytest.fixture(scope="module")
def engine() -> FusionEngine:
    template = PromptTemplate(chat_template_kwargs={"reasoning_effort": "low"})
    return make_warmed_engine(thinking_model(), template=template)


def hits(engine: FusionEngine, prompt: Prompt) -> int:
    prefilled = engine.prefill(prompt, method=METHOD)
    assert torch.allclose(prefilled.logits, plain_forward(engine.lm, prompt.ids)[0][-1], atol=1e-4)
    return sum(lookup.hit for lookup in prefilled.report.lookups)


@pytest.mark.parametrize(
    ("kwargs", "begins", "ends", "reused"),
    [
        ({}, "<s>Effort: low.", "", 1 + len(PASSAGES)),
        ({"enable_thinking": False}, "<s>Effort: low.", "</think>\n\n", 1 + len(PASSAGES)),
        ({"reasoning_effort": "high"}, "<s>Effort: high.", "", 0),  # all stands behind another system prefix
    ],
    ids=["the engine's variables", "another end", "another system prefix"],
)
def test_what_stands_behind_the_text_it_was_warmed_behind_is_reused(
    engine: FusionEngine, kwargs: dict[str, Any], begins: str, ends: str, reused: int
) -> None:
    prompt = engine.prompt(QUESTION, PASSAGES, chat_template_kwargs=kwargs)
    assert prompt.segments[0].text.startswith(begins)
    assert prompt.segments[-1].text.endswith(ends)
    assert hits(engine, prompt) == reused


def test_passages_in_messages_are_found_under_any_variables(engine: FusionEngine) -> None:
    conversation = [("user", f"{PASSAGES[0]}\n\n{QUESTION}")]
    prompt = engine.prompt_from_text(conversation, chat_template_kwargs={"enable_thinking": False})
    assert prompt.segments[-1].text.endswith("</think>\n\n")
    assert prompt.chunks
    assert prompt.prefix_ids == engine.prompts.prefix_ids


def test_finished_text_has_no_variables(engine: FusionEngine) -> None:
    with pytest.raises(InvalidTemplate, match="finished text has no chat template"):
        engine.prompt_from_text("Once.", chat_template_kwargs={"enable_thinking": False})


def test_an_engine_whose_template_reads_no_such_variable_is_not_made(engine: FusionEngine) -> None:
    with pytest.raises(InvalidTemplate, match="cannot set mood"):
        make_engine(engine.lm, MemoryStore(), template=PromptTemplate(chat_template_kwargs={"mood": "calm"}))
