"""Models that think: variables of their chat templates, and reasoning apart from answers."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseSynthesizer
from qcfuse_rag import FusionEngine, MemoryStore
from qcfuse_rag.errors import InvalidTemplate
from tests.support.engines import make_engine
from tests.support.passages import PASSAGES, QUESTION
from tests.support.thinking import answer_with, thinking_model

ANSWER = "<think>\nHm.\n</think>\n\nYes."
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
NODES = [NodeWithScore(node=TextNode(text=text)) for text in PASSAGES]


@pytest.fixture(scope="module")
def engine() -> FusionEngine:
    return make_engine(thinking_model(), MemoryStore())


@pytest.fixture
def llm(engine: FusionEngine) -> QCFuseLLM:
    return QCFuseLLM.from_engine(engine, max_new_tokens=100)


@pytest.fixture
def thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, ANSWER)


def reasoning(response: ChatResponse) -> str | None:
    """Return the reasoning of a message: of its block."""
    blocks = [block.content for block in response.message.blocks if block.block_type == "thinking"]
    return blocks[0] if blocks else None


async def last(pieces: Any) -> Any:
    """Return the last of some pieces; all have a delta."""
    piece = None
    async for piece in pieces:
        assert piece.delta is not None
    return piece


@pytest.mark.usefixtures("thinking")
async def test_reasoning_is_a_block_of_a_message_all_four_ways(llm: QCFuseLLM) -> None:
    messages = [ChatMessage(QUESTION)]
    pieces = list(llm.stream_chat(messages))
    awaited = await last(await llm.astream_chat(messages))
    for response in (llm.chat(messages), await llm.achat(messages), pieces[-1], awaited):
        assert (response.message.content, reasoning(response)) == ("Yes.", "Hm.")
    assert "".join(piece.delta or "" for piece in pieces) == "Yes."
    assert "".join(piece.additional_kwargs.get("thinking_delta", "") for piece in pieces) == "Hm."


@pytest.mark.usefixtures("thinking")
async def test_completions_are_without_their_reasoning(llm: QCFuseLLM) -> None:
    for response in (
        llm.complete(QUESTION),
        await llm.acomplete(QUESTION),
        list(llm.stream_complete(QUESTION))[-1],
        await last(await llm.astream_complete(QUESTION)),
    ):
        assert (response.text, response.additional_kwargs["reasoning_content"]) == ("Yes.", "Hm.")


@pytest.mark.usefixtures("thinking")
async def test_synthesised_answers_are_without_their_reasoning(llm: QCFuseLLM) -> None:
    whole, streaming = QCFuseSynthesizer(llm), QCFuseSynthesizer(llm, streaming=True)
    assert str(whole.synthesize(QUESTION, NODES)) == "Yes."
    assert str(await whole.asynthesize(QUESTION, NODES)) == "Yes."
    assert "".join(streaming.synthesize(QUESTION, NODES).response_gen) == "Yes."  # type: ignore[union-attr]
    pieces = [piece async for piece in (await streaming.asynthesize(QUESTION, NODES)).async_response_gen()]
    assert "".join(pieces) == "Yes."


@pytest.mark.slow
def test_a_call_sets_variables_of_the_chat_template(llm: QCFuseLLM, engine: FusionEngine) -> None:
    tokens = len(engine.lm.tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"])

    def prompt_tokens(response: Any) -> int:
        count: int = response.additional_kwargs["prompt_tokens"]
        return count

    chat, complete = [ChatMessage(QUESTION)], QUESTION
    assert prompt_tokens(llm.chat(chat, **NO_THINKING)) == prompt_tokens(llm.chat(chat)) + tokens
    assert prompt_tokens(llm.complete(complete, **NO_THINKING)) == prompt_tokens(llm.complete(complete)) + tokens
    with pytest.raises(InvalidTemplate, match="cannot set mood"):
        llm.chat(chat, chat_template_kwargs={"mood": "calm"})
    with pytest.raises(InvalidTemplate, match="finished text has no chat template"):
        llm.complete("Once.", formatted=True, **NO_THINKING)


def test_a_synthesizer_passes_variables_on(llm: QCFuseLLM, reports: list[dict[str, Any]]) -> None:
    synthesizer = QCFuseSynthesizer(llm)
    synthesizer.get_response(QUESTION, PASSAGES)
    synthesizer.get_response(QUESTION, PASSAGES, **NO_THINKING)
    plain, quiet = (report["prompt_tokens"] for report in reports)
    assert quiet > plain


@pytest.mark.usefixtures("thinking")
def test_earlier_reasoning_goes_to_the_chat_template(llm: QCFuseLLM) -> None:
    asked, response = ChatMessage(QUESTION), llm.chat([ChatMessage(QUESTION)])
    bare = ChatMessage("Yes.", role=MessageRole.ASSISTANT)
    counts = [llm.chat([asked, each, asked]).additional_kwargs["prompt_tokens"] for each in (response.message, bare)]
    assert counts[0] > counts[1]
